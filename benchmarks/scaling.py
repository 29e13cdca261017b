"""How costs grow with shards, writers, rows and readers: ``python -m benchmarks.scaling``; see docs/scale.md.

Every measurement runs in a process of its own, so that its peak of memory is its own. Data sets are names:
files of the right size that hold nothing where nothing is opened, else one small shard under as many names.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np

import rlio
from benchmarks import machine, object_store, small_shards
from benchmarks.report import replace_blocks, table
from rlio.catalog.listing import list_shards
from rlio.catalog.names import ShardName, sealed_name
from rlio.storage.filesystem import Storage

__all__ = ["PARTS", "TABLES", "Measured", "Sizes", "main", "measure"]

#: Rows of a shard in a data set of names, and of one that can be read.
ROWS = 2048
REAL_ROWS = 10
# Names that one file may have, on every filesystem.
_LINKS = 30_000
_NOTHING = "nothing"
_BATCHES = 20
# Names that an object store gives in one answer.
PAGE = 1000
# Seconds of a request of an object store, for arithmetic.
REQUEST = 0.05
# Tables that need every part.
_OF_ALL = ("constants", "petabyte")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured: (shards, writers) of each table.

    Attributes:
        listed: Data sets of names on a local disk.
        stored: Those on an object store.
        in_memory: Those in memory.
        read: Those that are read, in shuffled order.
        small: Those of small shards, whose work is compared with pyarrow's.
        rounds: Measured rounds; a call that takes long is measured once.
    """

    listed: tuple[tuple[int, int], ...] = (
        (10**3, 10**2),
        (10**4, 10**2),
        (10**5, 10**2),
        (10**5, 10**3),
        (10**5, 10**4),
    )
    stored: tuple[tuple[int, int], ...] = ((10**3, 10**2), (10**4, 10**2), (10**4, 10**3))
    in_memory: tuple[tuple[int, int], ...] = ((10**3, 10), (10**4, 10))
    read: tuple[tuple[int, int], ...] = ((10**3, 10**2), (10**4, 10**2), (10**5, 10**2))
    small: tuple[tuple[int, int], ...] = ((500, 5), (1000, 5), (2000, 5), (4000, 5))
    rounds: int = 3


TINY = Sizes(
    listed=((1200, 10), (1200, 40)),
    stored=((1100, 5),),
    in_memory=((1100, 5),),
    read=((30, 2),),
    small=((30, 2), (60, 2)),
    rounds=1,
)


@dataclass(frozen=True)
class Measured:
    """One measurement.

    Attributes:
        seconds: On the clock, the median of the rounds.
        cpu: Of all processors of the process.
        peak: Bytes by which memory grew at most; None: unknown.
        facts: What else was found.
    """

    seconds: float
    cpu: float
    peak: int | None
    facts: dict[str, float] = field(default_factory=dict)


# ---- in a process of its own ----


def take(call: Callable[[], Any], *, rounds: int, **facts: float) -> Measured:
    """Measure a call: its memory in a first run, its time in ``rounds`` more."""
    gc.collect()
    peak = _peak_of(call)
    clock, cpu = [], []
    for _ in range(rounds):
        gc.collect()
        begun, used = time.perf_counter(), time.process_time()
        result = call()
        clock.append(time.perf_counter() - begun)
        cpu.append(time.process_time() - used)
        del result
    return Measured(statistics.median(clock), statistics.median(cpu), peak, dict(facts))


def once(call: Callable[[], Any]) -> tuple[Measured, Any]:
    """Measure a call that is long, in one run; with its result."""
    gc.collect()
    found: list[Any] = []
    begun, used = time.perf_counter(), time.process_time()
    peak = _peak_of(lambda: found.append(call()))
    return Measured(time.perf_counter() - begun, time.process_time() - used, peak), found[0]


def _peak_of(call: Callable[[], Any]) -> int | None:
    """Bytes by which this process's memory grew at most during a call; None: unknown."""
    machine.resident()  # Gives back what was freed.
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: reset the high-water mark.
        before = _status("VmRSS")
    except OSError:
        call()
        return None
    result = call()
    peak = _status("VmHWM") - before
    del result
    return peak


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {name} in /proc/self/status")


def _listed(root: str, rounds: int) -> dict[str, Measured]:
    """Opening and polling a data set of names on a local disk."""
    storage = Storage.open(root)
    names = [entry.path.rsplit("/", 1)[1] for entry in storage.list("data")]
    found = {
        "names": take(lambda: storage.list("data"), rounds=rounds, bytes=sum(map(len, names))),
        "listing": take(lambda: list_shards(storage), rounds=rounds),
        "open": take(lambda: rlio.open_dataset(root), rounds=rounds),
        "poll": _poll(root, rounds),
    }
    listing = list_shards(storage)
    found["cover"] = take(lambda: [listing.cover(writer) for writer in listing.writers], rounds=rounds)
    dataset = rlio.open_dataset(root)
    # What a process that is spawned with the data set loads; the bytes never leave this process.
    data = ForkingPickler.dumps(dataset)
    found["share"] = take(lambda: ForkingPickler.loads(data), rounds=rounds, bytes=len(data))
    found["state"] = Measured(0, 0, None, {"bytes": len(json.dumps(dataset.snapshot()))})
    return found


def _poll(root: str, rounds: int) -> Measured:
    """One look of a follower that has read all that there is."""
    with rlio.FollowReader(root, idle_timeout=0) as reader:
        state = reader.state_dict()
        state["position"]["rows"] = rlio.open_dataset(root).snapshot()
        reader.load_state_dict(state)
        source: Any = reader._pass  # type: ignore[attr-defined]  # What a poll costs, no user can time alone.
        source._poll()
        return take(source._poll, rounds=rounds)


def _stored(root: str, options: dict[str, Any], rounds: int) -> dict[str, Measured]:
    """Opening a data set on an object store, with the number of requests that listing takes."""
    storage = Storage.open(root, storage_options=options)
    count = object_store.count_requests(storage)
    list_shards(storage)
    requests = count()
    opening = take(lambda: rlio.open_dataset(root, storage_options=options), rounds=rounds, requests=requests)
    return {"open": opening}


def _in_memory(shards: int, writers: int, rounds: int) -> dict[str, Measured]:
    """Opening a data set of names in fsspec's filesystem in memory."""
    from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

    root = "memory://scaling"
    _begin(root)
    for path, _ in names_of(shards, writers, size=1):
        full = f"/scaling/{path}"
        MemoryFileSystem.store[full] = MemoryFile(MemoryFileSystem(), full, b"x")
        parent = full.rpartition("/")[0]
        if parent not in MemoryFileSystem.pseudo_dirs:
            MemoryFileSystem.pseudo_dirs.append(parent)
    return {"open": take(lambda: rlio.open_dataset(root), rounds=rounds)}


def _read(root: str) -> dict[str, Measured]:
    """Shuffling and resuming: to the first batch, and from batch to batch."""

    def reader() -> rlio.DatasetReader:
        return rlio.DatasetReader(root, batch_size=256, shuffle=True, seed=0, cache="none")

    def first() -> rlio.DatasetReader:
        opened = reader()
        opened.sample()
        return opened

    found: dict[str, Measured] = {}
    found["first batch"], opened = once(first)
    taken, _ = once(lambda: [opened.sample() for _ in range(_BATCHES)])
    found["batch"] = Measured(taken.seconds / _BATCHES, taken.cpu / _BATCHES, taken.peak)
    state = opened.state_dict()
    opened.close()

    def resume() -> None:
        with reader() as fresh:
            fresh.load_state_dict(state)
            fresh.sample()

    measured, _ = once(resume)
    found["resume"] = Measured(
        measured.seconds, measured.cpu, measured.peak, {"bytes": len(json.dumps(state))}
    )

    def first_in_order() -> None:
        with rlio.DatasetReader(root, batch_size=256, cache="none", epochs=1) as ordered:
            ordered.sample()

    found["first batch, in order"], _ = once(first_in_order)
    return found


def _small(root: str, rounds: int) -> dict[str, Measured]:
    """Small shards, beside pyarrow."""
    found = small_shards.measure(root, rounds)
    return {name: Measured(each["seconds"], each["cpu"], None) for name, each in found.items()}


# ---- data sets ----


def names_of(shards: int, writers: int, *, size: int | None = None) -> Iterable[tuple[str, int]]:
    """Path and bytes of shards and seals, as writers name them; one writer in 100 has no seal."""
    rng = random.Random(0)
    for number in range(writers):
        folder = f"data/w{number:05d}-{rng.getrandbits(32):08x}"
        count = shards // writers
        for k in range(count):
            crcs = {"crc32": rng.getrandbits(32), "footer_crc32": rng.getrandbits(32)}
            name = ShardName(first=k * ROWS, rows=ROWS, size=size or rng.randrange(10**5, 4 * 10**5), **crcs)
            yield f"{folder}/{name.format()}", name.size
        if number % 100:
            yield f"{folder}/{sealed_name(count * ROWS)}", 1


def _begin(root: str) -> None:
    """A data set with a header and a schema, and no rows."""
    with rlio.ParquetWriter(root, writer_id="w00000-00000000", spool=None) as writer:
        writer.write(rlio.SampleBatch(rewards=np.zeros(REAL_ROWS, np.float32)))
    storage = Storage.open(root)
    for entry in storage.list("data"):
        storage.remove(entry.path)


def make_names(root: Path, shards: int, writers: int) -> None:
    """A data set on a local disk whose shards are files of the right size, and hold nothing."""
    _begin(str(root))
    for path, size in names_of(shards, writers):
        file = root / path
        file.parent.mkdir(exist_ok=True)
        with open(file, "wb") as handle:
            handle.truncate(size)


def make_readable(root: Path, shards: int, writers: int) -> None:
    """A data set of small shards that can be read: one under many names."""
    with rlio.ParquetWriter(root, writer_id="w00000-00000000", spool=None) as writer:
        writer.write(rlio.SampleBatch(rewards=np.arange(REAL_ROWS, dtype=np.float32)))
    (original,) = root.glob("data/*/*.parquet")
    rest = original.name.split("-", 1)[1]
    source = root / "source-0"
    shutil.move(original, source)
    shutil.rmtree(root / "data")
    made = 0
    for number in range(writers):
        folder = root / "data" / f"w{number:05d}-{number:08x}"
        folder.mkdir(parents=True)
        for k in range(shards // writers):
            made += 1
            if made % _LINKS == 0:
                source = Path(shutil.copyfile(source, root / f"source-{made}"))
            os.link(source, folder / f"{k * REAL_ROWS:012d}-{rest}")
        (folder / sealed_name(shards // writers * REAL_ROWS)).write_text("sealed\n")
    for source in root.glob("source-*"):
        source.unlink()


# ---- the run ----


def measure(parts: Iterable[str], sizes: Sizes, scratch: Path) -> dict[str, Any]:
    """Measure some parts; the result goes to JSON and to the tables."""
    found: dict[str, Any] = {"machine": machine.facts(), "rounds": sizes.rounds}
    for part in parts:
        found[part] = []
        for shards, writers in getattr(sizes, part):
            print(f"{part}: {shards:,} shards of {writers:,} writers ...", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                values = PARTS[part](Path(folder) / "root", shards, writers, sizes.rounds)
            found[part].append({"shards": shards, "writers": writers, "values": values})
    return found


def _run_listed(root: Path, shards: int, writers: int, rounds: int) -> Any:
    make_names(root, shards, writers)
    return _child("_listed", root=str(root), rounds=rounds)


def _run_stored(root: Path, shards: int, writers: int, rounds: int) -> Any:
    _begin(str(root))
    small = [(entry.path, (root / entry.path).read_bytes()) for entry in Storage.open(root).list()]
    try:
        with object_store.server(
            [*small, *((path, b"x") for path, _ in names_of(shards, writers, size=1))]
        ) as (
            uri,
            options,
        ):
            return _child("_stored", root=uri, options=options, rounds=rounds)
    except object_store.Unavailable as reason:
        return {_NOTHING: str(reason)}


def _run_in_memory(root: Path, shards: int, writers: int, rounds: int) -> Any:
    return _child("_in_memory", shards=shards, writers=writers, rounds=rounds)


def _run_read(root: Path, shards: int, writers: int, rounds: int) -> Any:
    make_readable(root, shards, writers)
    return _child("_read", root=str(root))


def _run_small(root: Path, shards: int, writers: int, rounds: int) -> Any:
    small_shards.make(root, shards, writers)
    return _child("_small", root=str(root), rounds=min(rounds, 2))


PARTS: dict[str, Callable[[Path, int, int, int], Any]] = {
    "listed": _run_listed,
    "stored": _run_stored,
    "in_memory": _run_in_memory,
    "read": _run_read,
    "small": _run_small,
}


def _child(function: str, **arguments: Any) -> Any:
    """What a function of this module finds in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scaling", "--measure", function, json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


# ---- tables ----


def _seconds(value: Any) -> str:
    return "" if value is None else f"{value['seconds']:.3g} ({value['cpu']:.3g})"


def _mib(value: Any) -> str:
    return "" if value is None or value["peak"] is None else f"{value['peak'] / 2**20:.0f}"


def _fact(value: Any, name: str = "bytes") -> str:
    return "" if value is None else f"{value['facts'][name]:,.0f}"


def _rows(
    run: dict[str, Any], part: str, cells: Callable[[dict[str, Any]], Sequence[str]]
) -> list[list[str]]:
    return [
        [f"{each['shards']:,}", f"{each['writers']:,}", *cells(each["values"])]
        for each in run.get(part, ())
        if _NOTHING not in each["values"]
    ]


def _opening(run: dict[str, Any]) -> str:
    headings = (
        "shards",
        "writers",
        "bytes of names",
        "names, s",
        "listing, s",
        "rows covered, s",
        "open, s",
        "MiB",
    )
    return table(
        headings,
        _rows(
            run,
            "listed",
            lambda v: (
                _fact(v["names"]),
                *(_seconds(v[name]) for name in ("names", "listing", "cover", "open")),
                _mib(v["open"]),
            ),
        ),
        "r" * len(headings),
    )


def _on_stores(run: dict[str, Any]) -> str:
    headings = ("store", "shards", "writers", "requests", "open, s")
    rows = []
    for store, part in (("S3 (moto)", "stored"), ("memory", "in_memory")):
        for row in _rows(
            run,
            part,
            lambda v: (
                _fact(v["open"], "requests") if "requests" in v["open"]["facts"] else "",
                _seconds(v["open"]),
            ),
        ):
            rows.append([store, *row])
    return table(headings, rows, "l" + "r" * (len(headings) - 1))


def _following(run: dict[str, Any]) -> str:
    headings = ("shards", "writers", "state, bytes", "a poll, s", "MiB")
    return table(
        headings,
        _rows(
            run,
            "listed",
            lambda v: (_fact(v["state"]), _seconds(v["poll"]), _mib(v["poll"])),
        ),
        "r" * len(headings),
    )


def _reading(run: dict[str, Any]) -> str:
    headings = (
        "shards",
        "writers",
        "first, s",
        "in order, s",
        "a batch, s",
        "resume, s",
        "state, bytes",
        "MiB",
    )
    return table(
        headings,
        _rows(
            run,
            "read",
            lambda v: (
                _seconds(v["first batch"]),
                _seconds(v["first batch, in order"]),
                _seconds(v["batch"]),
                _seconds(v["resume"]),
                _fact(v["resume"]),
                _mib(v["first batch"]),
            ),
        ),
        "r" * len(headings),
    )


def _sharing(run: dict[str, Any]) -> str:
    headings = ("shards", "writers", "open, s", "bytes that travel", "open from them, s", "MiB")
    return table(
        headings,
        _rows(
            run,
            "listed",
            lambda v: (_seconds(v["open"]), _fact(v["share"]), _seconds(v["share"]), _mib(v["share"])),
        ),
        "r" * len(headings),
    )


def _machine(run: dict[str, Any]) -> str:
    later = [
        f"\nMeasured later (`--only {part}`): {_facts(facts)}" for part, facts in run.get("later", {}).items()
    ]
    return "".join([_facts(run["machine"]), *later])


def _facts(facts: dict[str, Any]) -> str:
    load = ", ".join(map(str, facts["load_average_at_start"]))
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB; {facts['system']}, "
        f"Python {facts['python']}. Load average at the start: {load}.\n"
    )


def _constants(run: dict[str, Any]) -> str:
    """What one shard costs, from the largest data sets that were measured."""
    largest = max(run["listed"], key=lambda each: (each["shards"], -each["writers"]))
    many = max(run["listed"], key=lambda each: each["writers"])
    shuffled = max(run["read"], key=lambda each: each["shards"])["values"]
    n, values = largest["shards"], largest["values"]
    rows = [
        ("name, in a listing", f"{values['names']['facts']['bytes'] / n:.0f} bytes"),
        ("opening it, by listing", f"{1e6 * values['open']['cpu'] / n:.1f} us of processor"),
        ("holding it", f"{(values['open']['peak'] or 0) / n:.0f} bytes of memory"),
    ]
    if (on_s3 := _of_s3(run)) is not None:
        rows.append(("opening it, by listing S3", f"{1e6 * on_s3:.0f} us of processor"))
    reads = max(run["read"], key=lambda each: each["shards"])["shards"]
    rows.append(
        ("before a shuffled epoch", f"{1e6 * shuffled['first batch']['cpu'] / reads:.0f} us of processor")
    )
    state = many["values"]["state"]["facts"]["bytes"] / many["writers"]
    rows.append(("a writer, in a follower's state", f"{state:.0f} bytes"))
    return table(("of one shard", "measured"), rows, "lr")


def _of_s3(run: dict[str, Any]) -> float | None:
    """Seconds of processor for a shard of a listing of S3; None where that was not measured."""
    found = [each for each in run["stored"] if _NOTHING not in each["values"]]
    if not found:
        return None
    largest = max(found, key=lambda each: (each["shards"], -each["writers"]))
    return float(largest["values"]["open"]["cpu"] / largest["shards"])


def _petabyte(run: dict[str, Any]) -> str:
    """What roots of shards of 64 MiB would cost, by arithmetic with what one shard costs."""
    largest = max(run["listed"], key=lambda each: (each["shards"], -each["writers"]))
    n, values = largest["shards"], largest["values"]
    on_s3 = _of_s3(run)
    rows = []
    for name, shards in (("6.7 TB", 10**5), ("67 TB", 10**6), ("1 PB", 15 * 10**6)):
        requests = -(-shards // PAGE)
        rows.append(
            [
                name,
                f"{shards:,}",
                f"{requests:,}",
                f"{requests * REQUEST:,.0f} s",
                "" if on_s3 is None else f"{shards * on_s3:,.0f} s",
                f"{shards * values['open']['cpu'] / n:,.0f} s",
                f"{shards * (values['open']['peak'] or 0) / n / 1e6:,.0f} MB",
            ]
        )
    headings = (
        "one root of",
        "shards",
        "requests",
        "waiting",
        "listing S3",
        "opening",
        "memory",
    )
    return table(headings, rows, "l" + "r" * (len(headings) - 1))


#: Block of the page -> what makes it.
TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "machine": _machine,
    "opening": _opening,
    "stores": _on_stores,
    "following": _following,
    "reading": _reading,
    "sharing": _sharing,
    "small": lambda run: small_shards.show(run.get("small", ())),
    "constants": _constants,
    "petabyte": _petabyte,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or take what was measured, and show it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="sizes of a test")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="some parts; --json keeps the others")
    parser.add_argument("--data", type=Path, help="folder for data sets, which are removed again")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--from", dest="from_json", type=Path, metavar="FILE", help="show what was measured")
    parser.add_argument("--report", type=Path, metavar="PAGE", help="write the tables into this page")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw how small shards cost, as SVG")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure is not None:
        found = globals()[options.measure[0]](**json.loads(options.measure[1]))
        sys.stdout.write(json.dumps({name: asdict(value) for name, value in found.items()}) + "\n")
        return
    if options.from_json is not None:
        run = json.loads(options.from_json.read_text(encoding="utf-8"))
    else:
        with _scratch(options.data) as scratch:
            run = measure(options.only or PARTS, TINY if options.tiny else Sizes(), scratch)
        if options.only and options.json is not None and options.json.exists():
            before = json.loads(options.json.read_text(encoding="utf-8"))
            later = {**before.get("later", {}), **dict.fromkeys(options.only, run["machine"])}
            run = {**before, **run, "machine": before["machine"], "later": later}
    if options.json is not None:
        options.json.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    whole = set(PARTS) <= run.keys()
    blocks = {name: make(run) for name, make in TABLES.items() if whole or name not in _OF_ALL}
    sys.stdout.write("".join(f"{name}\n\n{text}\n" for name, text in blocks.items()))
    if options.report is not None:
        replace_blocks(options.report, blocks)
    if options.picture is not None:
        small_shards.draw(run["small"], options.picture)


@contextmanager
def _scratch(folder: Path | None) -> Any:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="scaling-", dir=folder) as scratch:
        yield Path(scratch)


if __name__ == "__main__":
    main()
