"""Hostile data ends in a typed error or a counted skip: in bounded memory, in time, and inside of its root.

Each case of `hostile_corpus` is opened in a forked child with 2 GiB of address space more than at its start.
As a script this file is the parent of those children: it has imported and used what they use, and no more, as
a fork of a process that ran other tests costs a tenth of a second.
"""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile_files  # noqa: F401  # Its cases.
import pytest
from further import further
from hostile_corpus import CASES, MARK, Case, cases

import rlio
from rlio.errors import RlioError
from rlio.limits import Limits

ADDRESS_SPACE = 2 << 30
# Arrow gives back what it has freed a while later: more on a busy machine.
GROWTH = 384 << 20
SECONDS = 20
# What a text may say of data: an excerpt of 200 characters, a name, a path, and our own words.
LONGEST_MESSAGE = 2500
# Cases that take a third of a second of a processor or more, and are like others.
LONG = (
    "JSON line: 2 million empty lists",
    "folder: rows that lie",
    "zip: 110,000 names",
    "Parquet footer: streams of 20 million lists",
    "JSON shard: objects: keys that collide",
    "JSON line: packed: texts in tuples, one of a megabyte",
    "Parquet footer: streams of 20 million numbers",
    "Parquet shard: a text of 20 MB beside 60,000",
    "foreign Parquet: 20,000 columns",
    "foreign Parquet: 100,000 rows that repeat a packed text",
    "JSON: a line of 200 MB",
    "JSON line: a text of a megabyte among a million values",
    "JSON line: packed: a text of a megabyte in a list of many",
    "JSON line: packed: bytes of a megabyte in a list of many",
    "JSON shard: 5 million lists",
    "Parquet shard: a text of a megabyte in 65,536 rows",
    "Parquet shard: an info of a megabyte in 65,536 rows",
    "Parquet shard: infos of 300,000 lists in 65,536 rows",
    "schema: 5,000 policies",
    "schema file: 20 million numbers",
    "zip: 60 MB of newlines",
    "zip: 60 MB of blank lines of Windows",
    "zip: 4,000 members of a line",
    "zip: 30,000 folders of a data set",
    "NPZ: a directory of 110,000 names",
    "HDF5: D4RL's filters, each twice",
    "HDF5: Tianshou's ring of 30 million rows of a byte",
    "HDF5: Tianshou's groups that hold each other",
    "HDF5: Robomimic's group in itself",
    "HDF5: D4RL's dataset of a thousand names",
    "HDF5: Minari's texts that are one text",
    "HDF5: Robomimic's texts that are one text",
    "RLDS: texts of a step, one of them long",
    "RLDS: pictures of 11,000 by 11,000",
)
FORBIDDEN = (
    "pickle.find_class",
    "os.system",
    "os.exec",
    "subprocess.Popen",
    "socket.connect",
    "os.mkdir",
    "ctypes.dlopen",
)

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.xdist_group("hostile"),  # One parent for all children.
]


def _further() -> set[str]:
    """Cases that `make test` leaves out: those that take long, and of the others of a kind two of three."""
    found, kinds = set(LONG), Counter[str]()
    for case in CASES:
        if case.name not in found and not case.harmless:
            kind = case.name.partition(":")[0]
            if kinds[kind] % 3:
                found.add(case.name)
            kinds[kind] += 1
    return found


FURTHER = _further()


def open_case(case: Case, folder: Path, mode: str) -> dict[str, Any]:
    """Read everything that there is; gives the rows served and skipped."""
    limits = Limits(**dict(case.options))
    options: dict[str, Any] = {"epochs": 1, "on_error": mode}
    if case.opener in ("dataset", "zip"):
        names = ("a.zip",) if case.opener == "zip" else ("root", "")
        root = next(folder / name for name in names if (folder / name).exists())
        with rlio.DatasetReader(root, limits=limits, **options) as reader:
            rows = sum(len(batch) for batch in reader)
            list(reader.dataset.episode_parts())
            return {"rows": rows, "skipped": reader.skipped}
    kinds: dict[str, Callable[..., Any]] = {
        "json": rlio.JsonReader,
        "foreign": rlio.ForeignParquetReader,
        "read": rlio.read,
    }
    if case.opener == "foreign" or case.options:
        options["limits"] = limits
    if case.mapping is not None:
        options["mapping"] = case.mapping
    with kinds[case.opener](str(folder), **options) as reader:
        return {"rows": sum(len(batch) for batch in reader), "skipped": reader.skipped}


def peak() -> int:
    """The most bytes of memory that this process ever held at once."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) << 10


def watch(folder: Path, done: list[str]) -> None:
    """Note what only code from the data could want: other programs, links to the network, files elsewhere."""
    allowed = os.path.realpath(folder)
    sys.dont_write_bytecode = True  # What a case imports first is no file of the data's.

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in FORBIDDEN:
            done.append(f"{event} {arguments!r:.200}")
        elif event == "open" and isinstance(arguments[0], (str, bytes)):
            path, flags = os.path.realpath(os.fsdecode(arguments[0])), arguments[2]
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            outside = not path.startswith(allowed) and path != os.devnull
            if (writes and outside) or "/secret" in path or path == "/etc/passwd":
                done.append(f"open {path}")

    sys.addaudithook(hook)


def child(case: Case, folder: Path, answer: int) -> None:
    """Read the case in both ways and send what came of it; never returns."""
    found: dict[str, Any] = {"done": []}
    try:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESS_SPACE, size + ADDRESS_SPACE))
        # Of the processor, so that a busy machine does not matter; then the child dies.
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        Path("/proc/self/clear_refs").write_text("5")  # The peak counts from here on.
        before = peak()
        watch(folder, found["done"])
        for mode in ("raise", "skip"):
            began = time.monotonic()
            try:
                found[mode] = open_case(case, folder, mode)
            except BaseException as error:
                found[mode] = {
                    "error": type(error).__name__,
                    "ours": isinstance(error, RlioError),
                    "text": str(error),
                    "trace": traceback.format_exc()[-3000:],
                }
            found[mode]["seconds"] = time.monotonic() - began
        found["growth"] = peak() - before
    finally:
        os.write(answer, json.dumps(found).encode())
        os._exit(0)


def run(case: Case, folder: Path) -> dict[str, Any]:
    """What the child found, or the signal that it died of."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        child(case, folder, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        text = stream.read()
    _, status = os.waitpid(pid, 0)
    if not os.WIFEXITED(status):
        return {"died": os.WTERMSIG(status)}
    found: dict[str, Any] = json.loads(text)
    return found


def serve() -> None:
    """Run the cases that standard input names, each with its folder."""
    # Import and use everything once, so that children neither import nor count that as theirs. Arrow imports
    # the first one where it reads what no harmless case has.
    import PIL.PngImagePlugin  # noqa: F401
    import pyarrow.dataset  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        for opener in ("dataset", "json", "foreign"):
            case = next(case for case in CASES if case.opener == opener and case.harmless)
            place = Path(folder) / opener
            place.mkdir()
            case.make(place)
            for mode in ("raise", "skip"):
                open_case(case, place, mode)
    gc.freeze()  # A collection in a child would copy the pages of all that the parent holds.
    by_name = {case.name: case for case in CASES}
    for line in sys.stdin:
        name, folder = json.loads(line)
        print(json.dumps(run(by_name[name], Path(folder))), flush=True)  # noqa: T201


@pytest.fixture(scope="module")
def parent() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def test_each_promise_of_the_security_page_names_tests_that_exist() -> None:
    here = Path(__file__).parent
    page = (here.parent / "docs/security.md").read_text("utf-8")
    promises = re.findall(r"^\| .* \| .* \| (.*) \|$", page.partition("## Bounds")[0], re.MULTILINE)[1:]
    assert len(promises) == 8
    known = {
        name
        for path in here.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    for promise in promises:
        assert re.findall(r"`(\w+)`", promise)
    assert {*re.findall(r"`(test_\w+)`", page)} <= known


def test_the_corpus_is_as_large_as_it_should_be() -> None:
    assert len(list(cases())) >= 150
    assert sum(case.harmless for case in CASES) < len(CASES) / 8


@pytest.mark.few(36)
@pytest.mark.parametrize(
    "case",
    [further(case)[0] if case.name in FURTHER else case for case in CASES],
    ids=lambda case: case.name,
)
def test_hostile_data_is_refused_or_skipped_within_bounds(
    case: Case, tmp_path: Path, parent: subprocess.Popen[str]
) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    case.make(folder)
    before = {str(path) for path in tmp_path.rglob("*")}
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(json.dumps([case.name, str(folder)]) + "\n")
    parent.stdin.flush()
    found = json.loads(parent.stdout.readline())
    assert "died" not in found, f"the process died of signal {found['died']}"
    for mode in ("raise", "skip"):
        result = found[mode]
        assert "error" not in result or result["ours"], result["trace"]
        assert len(result.get("text", "")) < LONGEST_MESSAGE, result["text"]
        assert result.get("text", "").isprintable(), result["text"]
    if case.harmless:
        assert "error" not in found["raise"], found["raise"]["trace"]
    else:
        assert "error" in found["raise"], found["raise"]
        assert "error" in found["skip"] or found["skip"]["skipped"] > 0, found["skip"]
    if case.rows is not None:
        assert found["skip"].get("rows") == case.rows, found["skip"]
    assert found["done"] == []
    assert {str(path) for path in tmp_path.rglob("*")} == before
    assert not (folder / MARK).exists()
    assert found["growth"] < GROWTH, f"{found['growth'] >> 20} MiB"


if __name__ == "__main__":
    serve()
