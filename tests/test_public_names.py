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
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from further import further

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
    "DatasetInfo",
    "DatasetReader",
    "EndOfData",
    "EnvRunner",
    "EpisodeTable",
    "Episode",
    "ExternalEnv",
    "FollowReader",
    "FollowingReplay",
    "ForeignParquetReader",
    "IOContext",
    "InputReader",
    "JsonReader",
    "JsonWriter",
    "Limits",
    "MappedInput",
    "Mapping",
    "Markers",
    "MixedInput",
    "MultiAgentBatch",
    "MultiAgentBatchBuilder",
    "MultiAgentEnv",
    "MultiAgentEnvRunner",
    "NStep",
    "NoopOutput",
    "OutputWriter",
    "Pace",
    "PacedWriter",
    "ParquetWriter",
    "Policy",
    "PolicySpec",
    "RandomPolicy",
    "RecordAECEnv",
    "RecordExperience",
    "RecordParallelEnv",
    "RecordVectorExperience",
    "RecordingInput",
    "ReplayStore",
    "RlioError",
    "Roll",
    "RolloutConfig",
    "RolloutWorker",
    "Ragged",
    "RowFilter",
    "SampleBatch",
    "SamplerInput",
    "SamplesPerInsert",
    "Sequences",
    "ShuffledInput",
    "TeeWriter",
    "TorchPolicy",
    "WholeEpisodes",
    "__version__",
    "concat_samples",
    "convert",
    "from_arrays",
    "from_episodes",
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
    assert len(PUBLIC) <= 70


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
    assert tree == set(errors.__all__) - {"excerpt", "raise_at"}
    assert all(name in str(errors.__doc__) for name in tree)


# docs/format.md is not among them: "rlio.<key>" there is a key in a footer.
PAGES = (
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/clusters.md", "docs/columns.md", "docs/commands.md",
    "docs/distributed.md", "docs/guarantees.md", "docs/plugins.md", "docs/recording.md", "docs/replay.md",
    "docs/rllib.md", "docs/rllib-before-1.md", "docs/start.md", "docs/peers.md",
)  # fmt: skip


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
            try:
                value = importlib.import_module(f"{module}.{part}")
            except errors.MissingExtra:
                return True  # What it has cannot be seen without its library.
        else:
            return part == "py"  # a file in the layout table
        module = f"{module}.{part}"
    return True


@pytest.mark.parametrize("package", INITS)
def test_an_unknown_name_is_an_attribute_error_that_names_the_package(package: str) -> None:
    with pytest.raises(AttributeError, match=rf"module '{package}' has no attribute 'Nonsense'"):
        _ = importlib.import_module(package).Nonsense


@pytest.mark.further
@pytest.mark.parametrize("package", ["rlio", *further(*(package for package in INITS if package != "rlio"))])
def test_a_star_import_gives_all_public_names_in_a_fresh_interpreter(package: str, tmp_path: Path) -> None:
    code = f"import {package} as p\nfrom {package} import *\nassert set(p.__all__) <= set(globals())"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_no_public_name_is_also_the_name_of_a_module_beside_it() -> None:
    """Once the module was imported, by whomever, the package would have it in place of the name."""
    for package in INITS:
        module = importlib.import_module(package)
        below = {found.name for found in pkgutil.iter_modules(module.__path__)}
        assert below & set(module.__all__) == set(), package


# What `**` may stand for in a public signature, and why no list of options could.
OPEN_KEYWORDS = {
    "SampleBatch.__init__": "columns",
    "BatchBuilder.add_values": "columns",
    "MultiAgentBatchBuilder.add_values": "columns",
    "ExternalEnv.log_action": "columns",
    "PolicyClient.log_action": "columns",
    "RecordExperience.record": "columns",
    "RecordVectorExperience.record": "columns",
    "RecordParallelEnv.record": "columns",
    "RecordAECEnv.record": "columns",
    "save_checkpoint": "parts, named by the caller",
    "load_checkpoint": "parts, named by the caller",
    "read": "options of the reader that opens the value, which may be a registered one",
    "Dataset.read": "likewise",
    "read_dataset": "options of ray.data.read_datasource",
    "make_atari": "options of gymnasium.make",
    "RolloutWorker.apply": "arguments of the caller's function",
    "RolloutWorker.for_policy": "arguments of the caller's function",
    "RolloutWorker.foreach_policy": "arguments of the caller's function",
    "RolloutWorker.foreach_policy_to_train": "arguments of the caller's function",
    "EnvContext.copy_with_overrides": "the fields of the copy that are changed",
    "EnvContext.with_index": "the fields of the copy that are changed",
    "RecordVectorExperience.close": "the interface of gymnasium.vector.VectorEnv",
    "Callbacks.on_": "arguments that a later version adds to a hook, as in RLlib",
    "FaultyFileSystem.": "the interface of fsspec.AbstractFileSystem",
    "FaultyRenamingFileSystem.": "the interface of fsspec.AbstractFileSystem",
}


def public_callables() -> Iterator[tuple[str, Callable[..., object]]]:
    """The functions, classes and methods of every public package, by qualified name."""
    packages = [*INITS, "rlio.batch", "rlio.errors", "rlio.evaluation", "rlio.maintenance", "rlio.testing"]
    for package in [*packages, "rlio.torch"]:
        module = importlib.import_module(package)
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isclass(found):
                for key in dir(found):
                    method = inspect.getattr_static(found, key)
                    method = getattr(method, "__func__", method)
                    own = getattr(method, "__module__", None) or ""
                    if (key == "__init__" or key[0] != "_") and callable(method) and own.startswith("rlio"):
                        yield f"{name}.{key}", method
            elif callable(found):
                yield name, found


def test_no_public_signature_hides_options_behind_two_stars() -> None:
    seen, hidden = set(), []
    for name, function in public_callables():
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                allowed = [
                    each for each in OPEN_KEYWORDS if name == each or (each[-1] in "._" and each in name)
                ]
                seen.update(allowed)
                if not allowed:
                    hidden.append(f"{name}(**{parameter.name})")
    assert not hidden
    assert seen == set(OPEN_KEYWORDS), "an exception that is none any more"


def test_help_shows_each_option_of_readers_and_samplers_with_its_default() -> None:
    import pydoc

    for thing in (
        rlio.DatasetReader,
        rlio.ReplayStore.uniform,
        rlio.FollowingReplay,
        rlio.torch.ReplayDataset,
    ):
        text = pydoc.render_doc(thing, renderer=pydoc.plaintext)
        for option in ("draw: ", "policy: str | None = None", "filter: ", "views: bool = False"):
            assert option in text, (thing, option)
    text = pydoc.render_doc(rlio.evaluation.evaluate_offline, renderer=pydoc.plaintext)
    assert "folds: int = 2" in text


def options_of(taker: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """What it takes by name, beside what it reads."""
    found = inspect.signature(taker).parameters.values()
    optional = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {each.name: each for each in found if each.kind in optional and each.name not in SUBJECTS}


#: What readers read, by the names that they have for it.
SUBJECTS = ("self", "root", "inputs", "value", "sources", "arrays", "episodes")


def readers_stores_and_samplers() -> Iterator[tuple[str, Callable[..., object]]]:
    from rlio.readers.episode_reader import EpisodeReader
    from rlio.readers.table_reader import read_table

    everything = [(name, getattr(rlio, name)) for name in rlio.__all__]
    for name, found in [
        *everything,
        ("ReplayDataset", rlio.torch.ReplayDataset),
        ("EpisodeReader", EpisodeReader),
    ]:
        if inspect.isclass(found) and (
            issubclass(found, rlio.InputReader) or found in (rlio.ReplayStore, rlio.torch.ReplayDataset)
        ):
            yield name, found
            for key, method in vars(found).items():
                if key[0] != "_" and callable(method := getattr(method, "__func__", method)):
                    yield f"{name}.{key}", method
    yield from (("read", rlio.read), ("read_table", read_table))
    yield from (("from_arrays", rlio.from_arrays), ("from_episodes", rlio.from_episodes))


def test_readers_stores_and_samplers_have_24_options_at_most() -> None:
    counts = {name: len(options_of(taker)) for name, taker in readers_stores_and_samplers()}
    assert {"read", "DatasetReader", "FollowingReplay", "ReplayStore.prioritised", "JsonReader"} <= set(
        counts
    )
    assert {name: count for name, count in counts.items() if count > 24} == {}


def test_the_docstring_of_a_reader_or_a_store_fits_a_screen() -> None:
    long = {
        name: len(taker.__doc__.splitlines())
        for name, taker in readers_stores_and_samplers()
        if taker.__doc__ and len(taker.__doc__.splitlines()) > 60
    }
    assert not long


def test_read_lists_every_option_of_the_readers_that_it_opens() -> None:
    from rlio.readers.episode_reader import EpisodeReader
    from rlio.readers.table_reader import read_table

    listed, text = options_of(rlio.read), str(rlio.read.__doc__)
    assert all(f"        {name}: " in text for name in listed)
    of_data_sets = options_of(rlio.DatasetReader)
    readers = (EpisodeReader, rlio.JsonReader, rlio.ForeignParquetReader, rlio.D4RLReader, read_table)
    one_kind = {"end", "source_column"}
    for reader in (rlio.DatasetReader, *readers):
        for name, parameter in options_of(reader).items():
            if name in listed:
                assert parameter.default == listed[name].default, (reader, name)
            else:
                one_kind.add(name)
    assert one_kind & set(of_data_sets) == set()
    others = text[text.index("        others: ") : text.index("    Returns:")]
    assert set(re.findall(r"``(\w+)``", others)) - set(listed) == one_kind


def test_every_reader_that_keeps_rows_chooses_where_by_default() -> None:
    """docs/reading.md states the rule."""
    found = [options_of(taker) for _, taker in readers_stores_and_samplers()]
    kept = [options["cache"].default for options in found if "cache" in options]
    assert kept.count("auto") >= 5
    assert set(kept) == {"auto", "memory"}, "'memory' is the default of ReplayStore.open, which is a store"


def test_the_defaults_that_signatures_show_are_those_of_the_options() -> None:
    import torch.utils.data

    from rlio.evaluation.estimation import EstimationKeywords
    from rlio.read_options import ReadKeywords, ReadOptions
    from rlio.support.options import default_options
    from rlio.torch import LoaderKeywords

    for shown, taker in (
        (ReadKeywords, ReadOptions),
        (EstimationKeywords, rlio.evaluation.Estimation),
        (LoaderKeywords, torch.utils.data.DataLoader),
    ):
        parameters = inspect.signature(taker).parameters
        for name, default in default_options(shown).items():
            assert parameters[name].default == default, (taker, name)
    dataset_reader = inspect.signature(rlio.DatasetReader).parameters
    for name, parameter in inspect.signature(rlio.torch.ReplayDataset).parameters.items():
        if name not in ("batch_size", "transform", "rank", "world"):
            assert dataset_reader[name].default == parameter.default, name


def test_a_worker_takes_twelve_arguments_at_most() -> None:
    assert len(inspect.signature(rlio.RolloutWorker).parameters) <= 12
