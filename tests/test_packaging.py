"""What is installed is what is in the checkout: mapping, wheel, source distribution, pins, import cost."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lazy_loader
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import rlio

# The wheel is built once a process: one process for all tests here.
pytestmark = pytest.mark.xdist_group("packaging")

PLUGIN_FOLDERS = ("readers", "schemas", "writers")
EXTRAS = (
    "atari", "azure", "d3rlpy", "dev", "gcs", "hdf5", "hf", "images", "minari", "msgpack", "mujoco", "pandas",
    "pettingzoo", "plot", "polars", "ray", "rlds", "rllib", "s3", "sb3", "sftp", "tensorboard", "torchrl",
    "video", "zarr",
)  # fmt: skip
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", "*.egg-info", "build", "dist", ".*_cache", ".hypothesis", "runs", "out"
)


@pytest.fixture(scope="module")
def project(checkout: Path) -> dict[str, Any]:
    return tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def source(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout to build in: leftovers of earlier builds would get into the wheel."""
    folder = tmp_path_factory.mktemp("source") / "rlio"
    shutil.copytree(checkout, folder, symlinks=True, ignore=NOT_SOURCE)
    return folder


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build an sdist or a wheel into a folder that has none."""
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", folder, source]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as an installer without wheels would."""
    folder = tmp_path_factory.mktemp("unpacked-sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return build("wheel", source, tmp_path_factory.mktemp("built-wheel"))


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as it lies in site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_with(unpacked: Path, code: str, cwd: Path) -> str:
    """Output of ``code`` in an interpreter that finds rlio in the wheel before the checkout."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={"PYTHONPATH": str(unpacked), "PATH": "/usr/bin:/bin", "HOME": str(cwd)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def packages_of(root: Path) -> set[str]:
    """Packages in the folders of a checkout, by the names they are installed under."""
    found = {
        ".".join(init.parent.relative_to(root).parts)
        for init in (root / "rlio").rglob("__init__.py")
        if not any(parent.is_symlink() for parent in init.parents)
    }
    for name in PLUGIN_FOLDERS:
        found |= {
            ".".join(("rlio", *init.parent.relative_to(root).parts))
            for init in (root / name).rglob("__init__.py")
        }
    return found


def modules_below(folder: Path) -> list[Path]:
    """Modules, and the stubs that say what packages export."""
    return [*folder.rglob("*.py"), *folder.rglob("*.pyi")]


def modules_in(root: Path) -> set[str]:
    """Files of the package, by their place in the wheel."""
    files = {f"{n}/{f.relative_to(root / n)}" for n in PLUGIN_FOLDERS for f in modules_below(root / n)}
    own = {str(f.relative_to(root)) for f in modules_below(root / "rlio")}
    links = tuple(f"rlio/{name}/" for name in PLUGIN_FOLDERS)
    return {f"rlio/{name}" for name in files} | {name for name in own if not name.startswith(links)}


def test_the_package_list_equals_the_folders(checkout: Path, project: dict[str, Any]) -> None:
    listed = project["tool"]["setuptools"]["packages"]
    assert listed == sorted(set(listed))
    assert set(listed) == packages_of(checkout)


def test_each_mapped_folder_exists_and_is_linked(checkout: Path, project: dict[str, Any]) -> None:
    mapping = project["tool"]["setuptools"]["package-dir"]
    assert mapping == {"rlio": "rlio", **{f"rlio.{name}": name for name in PLUGIN_FOLDERS}}
    links = [checkout / "rlio" / name for name in PLUGIN_FOLDERS]
    if not (checkout / ".git").exists():
        pytest.skip("a source distribution holds no symlinks; it is built and installed by the mapping")
    for link in links:
        assert link.is_symlink(), f"{link} is no symlink"
        assert link.readlink() == Path("..") / link.name


@pytest.mark.further
def test_the_wheel_holds_exactly_the_package(source: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == modules_in(source) | {"rlio/py.typed"}


@pytest.mark.further
def test_every_module_imports_from_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    names = sorted(
        ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        for file in (path.relative_to(unpacked) for path in unpacked.rglob("*.py"))
    )
    assert "rlio.readers" in names
    code = (
        "import importlib, sys\n"
        "from rlio.errors import MissingExtra\n"
        f"for name in {names!r}:\n"
        "    try:\n"
        "        module = importlib.import_module(name)\n"
        "    except MissingExtra:\n"
        "        assert name.startswith('rlio.integrations.'), f'{name} needs an extra to be imported'\n"
        "        continue\n"
        f"    assert module.__file__.startswith({str(unpacked)!r}), module.__file__\n"
        "    assert 'readers' not in sys.modules\n"
    )
    run_with(unpacked, code, tmp_path)


@pytest.mark.further
def test_the_wheel_has_the_command_the_licence_and_the_version(
    wheel: Path, unpacked: Path, tmp_path: Path
) -> None:
    (info,) = unpacked.glob("*.dist-info")
    assert "rlio = rlio.cli.main:main" in (info / "entry_points.txt").read_text()
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text()
    assert wheel.name.startswith(f"rlio-{rlio.__version__}-py3-none-any")
    code = "import sys; sys.argv = ['rlio', 'version', '--json']; from rlio.cli.main import main; main()"
    shown = json.loads(run_with(unpacked, code, tmp_path))
    assert shown["rlio"] == rlio.__version__
    assert shown["numpy"] == version("numpy")


@pytest.mark.further
def test_the_source_distribution_holds_every_tracked_file(checkout: Path, sdist: Path) -> None:
    if not (checkout / ".git").exists():
        pytest.skip("only a git checkout knows which files are tracked")
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=checkout, capture_output=True, text=True, check=True
    )
    tracked = {name for name in listing.stdout.split("\0") if name and (checkout / name).is_file()}
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked - held - {".gitignore"} == set()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PLUGIN_FOLDERS)
def test_a_plug_in_folder_refuses_its_bare_name(checkout: Path, name: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=checkout, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert f"installed as 'rlio.{name}'" in result.stderr


HEAVY = ("torch", "ray", "h5py", "pyarrow", "gymnasium", "matplotlib", "pandas", "fsspec", "typer", "rich")
# A data set is read and written without a learner, a simulator or a plot.
HEAVY_FOR_DATA = (
    "torch", "ray", "h5py", "pyarrow.dataset", "matplotlib", "pandas", "polars", "s3fs", "gcsfs", "adlfs",
    "zarr",
)  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import rlio", HEAVY),
        ("import rlio.readers, rlio.writers, rlio.schemas, rlio.errors, rlio.batch.columns", HEAVY),
        ("import rlio; rlio.SampleBatch, rlio.InputReader", (*HEAVY_FOR_DATA, "pyarrow", "gymnasium")),
        ("import rlio; rlio.ParquetWriter, rlio.DatasetReader, rlio.JsonReader, rlio.read", HEAVY_FOR_DATA),
        (
            "import rlio; rlio.RolloutWorker, rlio.RandomPolicy, rlio.TorchPolicy",
            ("torch", "ray", "matplotlib"),
        ),
        ("import rlio.cli.main", (*HEAVY_FOR_DATA, "pyarrow", "gymnasium")),
    ],
)
def test_heavy_libraries_wait_until_they_are_used(code: str, heavy: tuple[str, ...], tmp_path: Path) -> None:
    check = f"{code}\nimport sys\nprint([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", check], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def pins(checkout: Path, file: str = "constraints.txt") -> dict[str, str]:
    """Name -> version in a file of constraints."""
    lines = (checkout / file).read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", line) for line in wanted)
    assert wanted == sorted(wanted, key=lambda line: line.split("==")[0])
    return dict(line.split("==") for line in wanted)


def requirements(project: dict[str, Any]) -> Iterator[tuple[str, Requirement]]:
    """Name and requirement of every line in pyproject.toml."""
    extras = project["project"]["optional-dependencies"]
    assert sorted(extras) == list(EXTRAS)
    lines = [*project["project"]["dependencies"], *(line for lines in extras.values() for line in lines)]
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        if name == "rlio":
            assert requirement.extras <= set(extras)
        else:
            yield name, requirement


def test_every_requirement_is_pinned_to_a_version_that_it_allows(
    checkout: Path, project: dict[str, Any]
) -> None:
    pinned = pins(checkout)
    for name, requirement in requirements(project):
        assert name in pinned, f"{name} is not in constraints.txt"
        assert requirement.specifier.contains(pinned[name], prereleases=True), str(requirement)


def test_the_oldest_versions_that_are_tested_are_the_lower_bounds(
    checkout: Path, project: dict[str, Any]
) -> None:
    lowest = pins(checkout, "constraints-lowest.txt")
    wrong = {}
    for name, requirement in requirements(project):
        bounds = [each.version for each in requirement.specifier if each.operator == ">="]
        assert len(bounds) == 1, f"{name} has no lower bound"
        # Builds of an older torch bring gigabytes of CUDA libraries.
        if name != "torch" and Version(lowest[name]) != Version(bounds[0]):
            wrong[name] = lowest[name], bounds[0]
    assert wrong == {}
    assert lowest["torch"] == pins(checkout)["torch"]
    assert lowest["gymnasium"] == "1.2.2"  # what RLlib pins


def test_the_tests_of_the_oldest_versions_have_every_public_name(checkout: Path) -> None:
    makefile = (checkout / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (listed,) = re.findall(r"^LOWEST := (.*)$", makefile, flags=re.MULTILINE)
    texts = [(checkout / f"tests/test_{name}.py").read_text(encoding="utf-8") for name in listed.split()]
    # Not where all names are listed.
    used = {word for text in texts if "PUBLIC = [" not in text for word in re.findall(r"\w+", text)}
    assert set(rlio.__all__) - used - set(vars(rlio.errors)) == set()


@pytest.mark.further
def test_an_editable_install_is_not_shadowed_where_a_script_lies_beside_the_checkout(
    checkout: Path, source: Path, tmp_path: Path
) -> None:
    makefile = (checkout / "Makefile").read_text(encoding="utf-8")
    (mode,) = re.findall(r"^INSTALL = .* editable_mode=(\w+)", makefile, flags=re.MULTILINE)
    code = (
        "import sys; from setuptools.build_meta import build_editable;"
        "build_editable(sys.argv[1], {'editable_mode': sys.argv[2]})"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path, mode], cwd=source, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as editable:
        editable.extractall(tmp_path / "site")
    shutil.copytree(Path(lazy_loader.__file__).parent, tmp_path / "site" / "lazy_loader")
    assert source.name == "rlio"
    script = source.parent / "script.py"
    script.write_text(
        f"import site; site.addsitedir({str(tmp_path / 'site')!r})\n"
        "import rlio, rlio.errors, rlio.readers\n"
        "print(rlio.__file__, rlio.__version__)\n"
    )
    # Without the other packages of this environment, of which rlio is one.
    shown = subprocess.run([sys.executable, "-S", script], capture_output=True, text=True, check=False)
    assert shown.stdout.split() == [str(source / "rlio" / "__init__.py"), rlio.__version__], shown.stderr


def test_the_tests_run_with_what_is_pinned(checkout: Path, project: dict[str, Any]) -> None:
    pinned = pins(checkout)
    for requirement in map(Requirement, project["project"]["dependencies"]):
        name = canonicalize_name(requirement.name)
        assert version(name).split("+")[0] == pinned[name]
