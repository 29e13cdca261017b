"""CONTRIBUTING.md is true: the files that it names are there, its examples run, and pass the suites."""

import contextlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import blocks
from test_options_page import EPISODES, LENGTHS, MAPPING, RECORDED, verdicts

import rlio
import rlio.formats as rlio_formats
from rlio.batch import Batch, concat_samples
from rlio.formats.format import formats
from rlio.limits import DEFAULT_LIMITS
from rlio.opening import open_files
from rlio.testing import ReaderTests, SourceTests, WriterTests


def test_files_that_it_names_are_there(checkout: Path) -> None:
    text = (checkout / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]*(?:\.pyi?|\.md)?)`", text))
    assert len(named) > 30
    assert [name for name in sorted(named) if not (checkout / name).exists()] == []


def test_tests_that_its_tables_name_are_there(checkout: Path) -> None:
    text = (checkout / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = text.split("tests to run first |\n")[1].split("\n\n")[0].splitlines()[1:]
    named = {name for row in rows for name in row.rsplit("|", 2)[1].strip().split(", ")}
    assert len(named) > 10
    assert [name for name in sorted(named) if not (checkout / "tests" / f"test_{name}.py").exists()] == []


def examples(checkout: Path) -> dict[str, Any]:
    """The names that its examples define."""
    scope: dict[str, Any] = {"__name__": "contributing"}
    code = blocks(checkout / "CONTRIBUTING.md", "python")
    assert len(code) == 6
    for block in code:
        if "FORMAT = Format(" in block:
            continue  # A module of its own: see below.
        exec(compile(block, "CONTRIBUTING.md", "exec"), scope)
    return scope


def test_its_examples_run_and_pass_the_conformance_suites(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scope = examples(checkout)

    class Reads(ReaderTests):
        def make_reader(self) -> rlio.InputReader:
            reader: rlio.InputReader = scope["CsvReader"]("csv")
            return reader

        def expected_rows(self) -> Batch:
            return rlio.SampleBatch(t=np.arange(6.0), rewards=np.ones(6))

    class Writes(WriterTests):
        checks_schema = False  # That test needs a matrix as obs, which CSV has not; see below.

        def make_writer(self, root: Path) -> rlio.OutputWriter:
            writer: rlio.OutputWriter = scope["CsvWriter"](root)
            return writer

        def make_batch(self, rows: int, first: int = 0) -> rlio.SampleBatch:
            t = np.arange(first, first + rows)
            return rlio.SampleBatch(obs=(t / 2).astype(np.float32), t=t)

        def read_back(self, root: Path) -> Batch:
            found = concat_samples(list(scope["CsvReader"](root)))
            return rlio.SampleBatch(obs=found["obs"].astype(np.float32), t=found["t"].astype(np.int64))

    class Draws(ReaderTests):
        finite = False

        def make_reader(self) -> rlio.InputReader:
            reader: rlio.InputReader = scope["newest"](scope["store"], seed=0)
            return reader

        def expected_rows(self) -> None:
            return None

    run = 0
    for suite in (Reads(), Writes(), Draws()):
        for name, test in inspect.getmembers(suite, inspect.ismethod):
            if name.startswith("test_"):
                folder = tmp_path / f"{type(suite).__name__}-{name}"
                test(folder) if "tmp_path" in inspect.signature(test).parameters else test()
                run += 1
    assert run > 30
    with scope["CsvWriter"]("unlike") as writer:
        writer.write(rlio.SampleBatch(t=[1]))
        with pytest.raises(rlio.errors.SchemaError):
            writer.write(rlio.SampleBatch(t=[0.5]))
    with pytest.raises(rlio.EndOfData):
        scope["newest"](rlio.ReplayStore(capacity=10)).sample()


@contextlib.contextmanager
def formats_of(folder: Path, modules: dict[str, str]) -> Iterator[None]:
    """rlio with further modules in ``rlio.formats``."""
    (folder / "formats").mkdir()
    for name, code in modules.items():
        (folder / f"formats/{name}.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rlio_formats, "__path__", [*rlio_formats.__path__, str(folder / "formats")])
        formats.cache_clear()
        try:
            yield
        finally:
            for name in modules:
                sys.modules.pop(f"rlio.formats.{name}", None)
            formats.cache_clear()


def _of_the_engine(path: Path) -> SourceTests:
    class Suite(SourceTests):
        def make_source(self) -> Any:
            return open_files(path, storage_options=None, limits=DEFAULT_LIMITS, on_error="raise")

        def expected_rows(self) -> None:
            return None

    return Suite()


def example_of_a_format(checkout: Path) -> str:
    (module,) = [
        code for code in blocks(checkout / "CONTRIBUTING.md", "python") if "FORMAT = Format(" in code
    ]
    return module


def test_its_example_of_a_format_is_one_module_that_rlio_reads_and_converts(
    checkout: Path, tmp_path: Path
) -> None:
    with formats_of(tmp_path, {"run_files": example_of_a_format(checkout)}):
        lines = [[t, t + 0.5, t % 2, 1] for t in range(7)]
        (runs := tmp_path / "runs").mkdir()
        for name, part in (("a", lines[:3]), ("b", lines[3:])):
            np.savetxt(runs / f"{name}.run", part)
        suite = _of_the_engine(runs)
        for name in [name for name in dir(suite) if name.startswith("test_")]:
            getattr(suite, name)()
        report = rlio.convert(runs, tmp_path / "out", prove=True)
        assert (report.source_format, report.episodes, report.rows) == ("run", 2, 7)
        report = rlio.convert(tmp_path / "out", tmp_path / "again", to="run", prove=True)
        assert (report.written, {f.kind for f in report.findings}) == (7, {"no_final_obs"})
        assert len(list((tmp_path / "again").glob("*.run"))) == 2
        wide = rlio.from_episodes([{"obs": np.zeros((2, 3)), "actions": [0, 1], "rewards": [0.0, 1.0]}])
        with pytest.raises(rlio.errors.SchemaError, match=r"found rows of shape \(3,\), expected \(2,\)"):
            rlio.convert(wide, tmp_path / "wide", to="run")
        with rlio.read(tmp_path / "out", epochs=1) as reader:
            rows = concat_samples(list(reader))
        assert isinstance(rows, rlio.SampleBatch)
        assert rows["obs"].tolist() == [line[:2] for line in lines]
        assert np.flatnonzero(rows["terminateds"]).tolist() == [2, 6]
        assert np.flatnonzero(~rows["new_obs_valid"]).tolist() == [2, 6]
        (runs / "c.run").write_text("1 2 3\n")
        with pytest.raises(rlio.errors.CorruptData):
            rlio.read(runs, epochs=1)


TABLE = '''
"""Tables `*.cols`: the names of the columns on the first line, then a row a line."""

import numpy as np
from rlio.formats.format import Format, Marks
from rlio.formats.tables.table import Table
from rlio.storage import open_input

FORMAT = Format(
    name="cols",
    title="Tables of numbers",
    marks=Marks(endings=(".cols",), by_ending=True),
    source=f"{__name__}:ColsTable",
    table=f"{__name__}:ColsTable",
)


class ColsTable(Table):
    def __init__(self, place, *, limits):
        super().__init__(place.uri, place.files)
        self._columns = []
        for file in place.files:
            with open_input(file) as stream:
                names, *lines = stream.read(limits.line_bytes).decode().splitlines()
            values = np.array([line.split() for line in lines], float)
            self._columns.append(dict(zip(names.split(), values.T)))
            self.add_file(names.split(), len(values))

    def read(self, rows, names):
        kept = slice(None) if rows.keep is None else rows.keep
        columns = self._columns[rows.file]
        return {name: columns[name][rows.start : rows.stop][kept] for name in names}

    def close(self):
        pass
'''


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["episodes", "a table"])
def test_every_option_works_at_once_on_a_new_format(kind: str, checkout: Path, tmp_path: Path) -> None:
    """No code but the module of the format, the example of the page or a made-up table, knows it."""
    rows = np.column_stack([RECORDED["obs"], RECORDED["actions"], RECORDED["rewards"]])
    with formats_of(tmp_path, {"run_files": example_of_a_format(checkout), "cols_files": TABLE}):
        if kind == "episodes":
            (place := tmp_path / "runs").mkdir()
            for number in range(len(LENGTHS)):
                np.savetxt(place / f"{number:02}.run", rows[number == EPISODES])
            own: dict[str, Any] = {}
        else:
            place = tmp_path / "table.cols"
            columns = [rows, RECORDED["terminateds"], EPISODES, RECORDED["new_obs"]]
            names = "x y act rew end trip x2 y2"
            np.savetxt(place, np.column_stack(columns), header=names, comments="")
            own = {"mapping": replace(MAPPING, truncated=None, dtypes={"actions": "int64", "obs": "float32"})}
        tried = verdicts(place, own)
    assert len(tried) > 15
    assert {*tried.values()} == {"yes"}, tried
