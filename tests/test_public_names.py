"""The public names: literal in four `__init__` files, resolvable, documented, and changed only on purpose."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rlio
from rlio import errors

INITS = {
    "rlio": "rlio/__init__.pyi",
    "rlio.connectors": "rlio/connectors/__init__.pyi",
    "rlio.distributed": "rlio/distributed/__init__.pyi",
    "rlio.envs": "rlio/envs/__init__.pyi",
    "rlio.log": "rlio/log/__init__.pyi",
    "rlio.policies": "rlio/policies/__init__.pyi",
    "rlio.readers": "readers/__init__.pyi",
    "rlio.sampling": "rlio/sampling/__init__.pyi",
    "rlio.schemas": "schemas/__init__.pyi",
    "rlio.serving": "rlio/serving/__init__.pyi",
    "rlio.writers": "writers/__init__.pyi",
}

# A name that leaves this list breaks somebody's program: the changelog says so, and what to do.
PUBLIC = [
    "AsyncInput",
    "BatchBuilder",
    "Callbacks",
    "Columns",
    "D4RLReader",
    "Dataset",
    "DatasetReader",
    "EndOfData",
    "EnvRunner",
    "Episode",
    "ExternalEnv",
    "ExternalRunner",
    "FollowingReplay",
    "ForeignParquetReader",
    "IOContext",
    "InputReader",
    "JsonReader",
    "JsonWriter",
    "Limits",
    "MappedInput",
    "Markers",
    "MixedInput",
    "MultiAgentBatch",
    "MultiAgentBatchBuilder",
    "MultiAgentEnv",
    "MultiAgentEnvRunner",
    "MultiAgentEpisode",
    "NoopOutput",
    "OutputWriter",
    "Pace",
    "PacedWriter",
    "ParquetWriter",
    "Policy",
    "PolicySpec",
    "RandomPolicy",
    "RecordExperience",
    "RecordVectorExperience",
    "RecordingInput",
    "ReplayStore",
    "RlioError",
    "Roll",
    "RolloutConfig",
    "RolloutWorker",
    "SampleBatch",
    "SamplerInput",
    "SamplesPerInsert",
    "ShuffledInput",
    "TeeWriter",
    "TorchPolicy",
    "__version__",
    "concat_samples",
    "load_checkpoint",
    "open_dataset",
    "read",
    "register_input",
    "register_output",
    "save_checkpoint",
    "verify",
]


@pytest.mark.parametrize("package", INITS)
def test_the_stub_of_an_init_names_what_each_home_exports(checkout: Path, package: str) -> None:
    tree = ast.parse((checkout / INITS[package]).read_text(encoding="utf-8"))
    homes = {
        alias.name: f"{package}.{node.module}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    module = importlib.import_module(package)
    assert set(module.__all__) - {"__version__"} == set(homes)
    for name, home in homes.items():
        assert hasattr(importlib.import_module(home), name), f"{home} has no {name}"


@pytest.mark.parametrize("package", INITS)
def test_every_public_name_resolves_to_a_documented_object(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        assert name in dir(module)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__module__.split(".")[0] == "rlio", f"{name} comes from {value.__module__}"
            assert (value.__doc__ or "").strip(), f"{package}.{name} has no docstring"


def test_the_public_surface_changes_only_on_purpose() -> None:
    assert sorted(rlio.__all__) == sorted(PUBLIC)
    assert len(PUBLIC) <= 60


def test_import_rlio_alone_reaches_every_package() -> None:
    code = (
        "import rlio; rlio.policies.DQN, rlio.errors.CorruptData, rlio.maintenance.gc, "
        "rlio.connectors.Flatten, "
        "rlio.envs.make_multi_agent, rlio.batch.in_c_order, rlio.serving.PolicyClient, rlio.log.Spool, "
        "rlio.testing.ReaderTests, rlio.evaluation.evaluate_offline, rlio.distributed.WorkerGroup"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    # Functions and modules of one name: whichever was imported first, the name is the function's.
    code = (
        "import rlio.maintenance.verify, rlio; assert callable(rlio.maintenance.gc) and callable(rlio.verify)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_reader_and_writer_of_a_plug_in_folder_is_public_at_the_top() -> None:
    shipped = {*rlio.readers.__all__, *rlio.writers.__all__}
    assert shipped <= set(rlio.__all__)
    for name in shipped:
        home = rlio.readers if name in rlio.readers.__all__ else rlio.writers
        assert getattr(home, name) is getattr(rlio, name)


def test_every_error_is_public_and_has_a_line_in_the_tree() -> None:
    tree = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert tree == set(errors.__all__) - {"excerpt"}
    assert all(name in str(errors.__doc__) for name in tree)


# docs/format.md is not among them: "rlio.<key>" there is a key in a footer.
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/rllib.md", "docs/distributed.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_public_name_in_a_page_exists(checkout: Path, page: str) -> None:
    if not (checkout / page).exists():
        pytest.skip(f"{page} is not in this distribution")
    text = (checkout / page).read_text(encoding="utf-8")
    for name in sorted(set(re.findall(r"\brlio((?:\.\w+)+)", text))):
        assert resolves(name.removeprefix(".").split(".")), f"{page} names rlio{name}"


def resolves(path: list[str]) -> bool:
    """Whether ``rlio.<path>`` is a public name or a module, or an attribute of one."""
    value: object = rlio
    module = "rlio"
    for part in path:
        if hasattr(value, part):
            value = getattr(value, part)
        elif importlib.util.find_spec(f"{module}.{part}") is not None:
            value = importlib.import_module(f"{module}.{part}")
        else:
            return part == "py"  # a file in the layout table
        module = f"{module}.{part}"
    return True


@pytest.mark.parametrize("package", INITS)
def test_an_unknown_name_is_an_attribute_error_that_names_the_package(package: str) -> None:
    with pytest.raises(AttributeError, match=rf"module '{package}' has no attribute 'Nonsense'"):
        _ = importlib.import_module(package).Nonsense


@pytest.mark.parametrize("package", INITS)
def test_a_star_import_gives_all_public_names_in_a_fresh_interpreter(package: str, tmp_path: Path) -> None:
    code = f"import {package} as p\nfrom {package} import *\nassert set(p.__all__) <= set(globals())"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_no_public_name_is_also_the_name_of_a_module_beside_it() -> None:
    """Once the module was imported, by whomever, the package would have it in place of the name."""
    for package in INITS:
        module = importlib.import_module(package)
        below = {found.name for found in pkgutil.iter_modules(module.__path__)}
        assert below & set(module.__all__) == set(), package
