"""A third-party package plugs in: its entry points are found, and the suites prove its reader and writer."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting import rows_of

import rlio
from rlio.batch import Batch, SampleBatch, concat_samples
from rlio.reader import InputReader
from rlio.resolve import IOContext, resolve_input, resolve_output
from rlio.testing import ReaderTests, WriterTests, assert_same
from rlio.writer import OutputWriter

PACKAGE = Path(__file__).parent / "plugin_package"


def install(site: Path, project: dict[str, Any], folder: Path) -> None:
    """Put a project where Python looks, with the metadata that pip would write from its pyproject.toml."""
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = project["entry-points"].items()
    (info / "entry_points.txt").write_text(
        "\n".join(
            f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in points.items())
            for group, points in groups
        )
    )
    sys.path[:0] = [str(site), str(folder)]
    importlib.invalidate_caches()


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs projects until the test ends."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def add(project: dict[str, Any], folder: Path) -> None:
        install(tmp_path / f"site-{project['name']}", project, folder)

    yield add
    for name in set(sys.modules) - before:
        if name.startswith(("rlio_npz", "rlio_other")):
            del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def plugin(installer: Callable[..., None]) -> Any:
    """The package of tests/plugin_package, installed."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installer(project, PACKAGE)
    return importlib.import_module("rlio_npz")


def save(folder: Path, *batches: SampleBatch) -> None:
    """Write files without the plug-in."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, batch in enumerate(batches):
        np.savez(folder / f"{number:03d}.npz", **{name: batch[name] for name in batch})


class TestPluginReader(ReaderTests):
    @pytest.fixture(autouse=True)
    def _data(self, plugin: Any, tmp_path: Path) -> None:
        self.plugin, self.folder = plugin, tmp_path / "data"
        save(self.folder, rows_of(0, 4), rows_of(4, 5), rows_of(5, 16), rows_of(16, 19))

    def make_reader(self) -> InputReader:
        return self.plugin.NpzReader(self.folder, epochs=1)

    def expected_rows(self) -> Batch:
        return rows_of(0, 19)


class TestPluginWriter(WriterTests):
    @pytest.fixture(autouse=True)
    def _package(self, plugin: Any) -> None:
        self.plugin = plugin

    def make_writer(self, root: Path) -> OutputWriter:
        return self.plugin.NpzWriter(root / "data")

    def read_back(self, root: Path) -> Batch:
        return concat_samples([SampleBatch(dict(np.load(path))) for path in sorted(root.glob("data/*.npz"))])


def test_an_installed_package_is_found_by_name_on_both_sides(plugin: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "runs")
    options = {"folder": folder}
    with resolve_output("npz", IOContext(options=options)) as writer:
        assert isinstance(writer, plugin.NpzWriter)
        writer.write(rows_of(0, 5))
    with rlio.read("npz", folder=folder, epochs=2) as reader:
        assert isinstance(reader, plugin.NpzReader)
        assert_same(concat_samples(list(reader)), concat_samples([rows_of(0, 5)] * 2))


def test_a_function_of_a_package_gets_the_context(plugin: Any, tmp_path: Path) -> None:
    save(tmp_path / "runs", rows_of(0, 2), rows_of(2, 5), rows_of(5, 9))
    context = IOContext(worker_index=2, num_workers=2, options={"folder": tmp_path / "runs", "epochs": 1})
    with resolve_input("npz-shard", context) as reader:
        assert_same(concat_samples(list(reader)), rows_of(2, 5))


def test_a_plugin_mixes_with_what_rlio_ships(plugin: Any, tmp_path: Path) -> None:
    save(tmp_path / "runs", rows_of(0, 4))
    with rlio.read(
        {"npz": 3, plugin.NpzReader(tmp_path / "runs"): 1}, batch_size=8, folder=tmp_path / "runs"
    ) as mix:
        assert len(mix.sample()) == 8
        assert mix.counts == {"npz": 6, "source_1": 2}


def test_the_metadata_names_the_entry_points_of_the_project(plugin: Any) -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for points in project["entry-points"].values():
        for place in points.values():
            module, name = place.split(":")
            assert callable(getattr(importlib.import_module(module), name))


def test_two_packages_with_one_name_raise_and_both_are_named(
    plugin: Any, installer: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "rlio_other.py").write_text("from rlio_npz import NpzReader as Mine\n")
    points = {"rlio.readers": {"npz": "rlio_other:Mine"}}
    installer({"name": "rlio-other", "version": "0.1", "entry-points": points}, tmp_path)
    with pytest.raises(rlio.errors.OptionError, match=r"rlio_npz:NpzReader of rlio-npz 1\.2\.0") as caught:
        rlio.read("npz", folder="x")
    assert "rlio_other:Mine of rlio-other 0.1" in str(caught.value)


@pytest.mark.parametrize(
    ("place", "message"),
    [("rlio_other:Missing", "Missing"), ("rlio_absent:Reader", "rlio_absent"), ("rlio_other:number", "is 3")],
)
def test_an_entry_point_that_leads_nowhere_raises_and_names_the_package(
    installer: Callable[..., None], tmp_path: Path, place: str, message: str
) -> None:
    (tmp_path / "rlio_other.py").write_text("number = 3\n")
    installer(
        {"name": "rlio-other", "version": "0.1", "entry-points": {"rlio.readers": {"broken": place}}},
        tmp_path,
    )
    with pytest.raises(rlio.errors.OptionError, match=f"rlio-other 0.1.*{message}"):
        rlio.read("broken")


def test_what_a_process_registers_wins_over_an_installed_package(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlio import resolve

    monkeypatch.setattr(resolve._outputs, "_creators", {})
    rlio.register_output("npz", rlio.NoopOutput)
    assert isinstance(resolve_output("npz", IOContext()), rlio.NoopOutput)
