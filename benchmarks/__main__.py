"""Measures rlio beside its peers: ``python -m benchmarks``; see docs/performance.md."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import machine, report
from benchmarks.parts import PARTS, WHOLE, part
from benchmarks.results import Run
from benchmarks.scales import FULL, QUICK, Scale, Setup

__all__ = ["default_data", "main", "measure"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or take what was measured, and show it."""
    options = _options(arguments)
    if options.plot is not None:
        import matplotlib  # noqa: F401 # without it, nothing is measured in vain
    if options.from_json is not None:
        run = Run.from_json(json.loads(options.from_json.read_text(encoding="utf-8")))
    else:
        scale = QUICK if options.quick else FULL
        given = {"rounds": options.rounds, "rows": options.rows}
        scale = dataclasses.replace(scale, **{k: v for k, v in given.items() if v is not None})
        run = measure(options.only or WHOLE, scale=scale, data=options.data)
    report.show(run)
    if options.json is not None:
        options.json.write_text(json.dumps(run.to_json(), indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        report.plot(run, options.plot)
    if options.report is not None:
        report.update_page(options.report, run)


def measure(parts: Sequence[str], *, scale: Scale, data: Path) -> Run:
    """Run the named parts, one after the other, in this process.

    Args:
        parts: Names in `PARTS`.
        scale: Sizes.
        data: Folder for recordings, which are kept, and for the rest, which is not.
    """
    data = data.absolute()
    data.mkdir(parents=True, exist_ok=True)
    # Sizes that grow are with the figures.
    options = {k: v for k, v in dataclasses.asdict(scale).items() if not isinstance(v, tuple)}
    run = Run(machine.facts(), {"parts": list(parts), "only": set(parts) != set(WHOLE), **options})
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=data) as scratch, _own_folders(Path(scratch)):
        for name in parts:
            begun, cpu = time.perf_counter(), time.process_time()
            print(f"{name} ...", file=sys.stderr, flush=True)
            run.sections.append(part(name)(Setup(scale=scale, data=data, scratch=Path(scratch))))
            took, cpu = time.perf_counter() - begun, time.process_time() - cpu
            print(f"{name}: {took:.0f} s, {cpu:.0f} s of processors", file=sys.stderr, flush=True)
    return run


@contextmanager
def _own_folders(scratch: Path) -> Iterator[None]:
    """What stores and Minari keep belongs to this run, and must not push out what the user has in theirs."""
    own = {"RLIO_CACHE": scratch / "cache", "MINARI_DATASETS_PATH": scratch / "minari"}
    before = {name: os.environ.pop(name, None) for name in own}
    os.environ.update({name: str(folder) for name, folder in own.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures rlio beside its peers, in one run; docs/performance.md explains it.",
    )
    names = ", ".join(name if name in WHOLE else f"{name} (only if named)" for name in PARTS)
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), metavar="PART", help=f"some parts of: {names}"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, few rounds: a first look in 2 minutes"
    )
    parser.add_argument(
        "--rounds", type=_positive, help=f"measured rounds (default {FULL.rounds}; quick {QUICK.rounds})"
    )
    parser.add_argument(
        "--rows", type=_positive, help=f"rows of HalfCheetah (default {FULL.rows:,}; quick {QUICK.rows:,})"
    )
    parser.add_argument(
        "--data", type=Path, default=default_data(), help="folder of recordings (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument(
        "--from", dest="from_json", type=Path, metavar="JSON", help="measure nothing; show this file"
    )
    parser.add_argument("--plot", type=Path, help="draw it to this file (needs the extra plot)")
    parser.add_argument(
        "--report", type=Path, metavar="PAGE", help="write the tables into this page, between its comments"
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: a whole number, at least 1")
    return value


def default_data() -> Path:
    """The folder of recordings, if the user names none."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlio-benchmarks"


if __name__ == "__main__":
    main()
