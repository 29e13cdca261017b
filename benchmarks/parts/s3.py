"""An epoch in order over small shards on an S3 server of this machine, 30 and 50 ms away."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import rlio
from benchmarks import object_store
from benchmarks.data import half_cheetah, slices
from benchmarks.results import Section
from benchmarks.scales import Setup
from benchmarks.timing import Case, interleave

__all__ = ["run"]

_SHARD_ROWS = 2500
_SHARDS = 200
_DELAYS = (0.03, 0.05)
_PEERS = ("pyarrow.dataset", "datasets")


def run(setup: Setup) -> Section:
    """An epoch of rlio beside pyarrow.dataset with s3fs, and Hugging Face's streaming."""
    shards = min(_SHARDS, max(2, setup.scale.rows // _SHARD_ROWS))
    rows = shards * _SHARD_ROWS
    section = Section(
        "s3", f"S3 (moto): an epoch in order over {shards} shards of {_SHARD_ROWS:,} rows of HalfCheetah-v5"
    )
    work = "an epoch in order on S3, {:.0f} ms a request"
    try:
        with object_store.server([]) as (root, options):
            parts = slices(half_cheetah(setup.data, min(rows, setup.scale.rows)), _SHARD_ROWS)
            with rlio.ParquetWriter(root, storage_options=options) as writer:
                for number in range(shards):  # A small recording is repeated.
                    writer.write(rlio.SampleBatch(parts[number % len(parts)]))
                    writer.flush()
            for delay in _DELAYS:
                with object_store.delayed(options, delay) as (far, requests):
                    _measure(section, setup, root, far, requests, rows=rows, work=work.format(1000 * delay))
    except object_store.Unavailable as error:
        section.absent |= {name: str(error) for name in ("rlio", *_PEERS)}
        for delay in _DELAYS:
            section.missing(work.format(1000 * delay), beside=_PEERS[0], at_least=1, names=["rlio"])
    return section


def _measure(
    section: Section,
    setup: Setup,
    root: str,
    options: dict[str, Any],
    requests: Callable[[], int],
    *,
    rows: int,
    work: str,
) -> None:
    calls: dict[str, Callable[[], object]] = {"rlio": lambda: _rlio(root, options)}
    calls["pyarrow.dataset"] = lambda: _pyarrow(root, options)
    if importlib.util.find_spec("datasets") is None:
        section.absent["datasets"] = "not installed"
    else:
        calls["datasets"] = lambda: _hugging_face(root, options)
    for name, call in calls.items():
        requests()
        call()
        section.facts[f"{work}: requests of {name}"] = requests()
    cases = [Case(name, call, rows, once=True) for name, call in calls.items()]
    section.add_taken(work, interleave(cases, rounds=min(setup.scale.rounds, 3), seconds=0))
    section.compare(work, case=work, ours="rlio", beside="pyarrow.dataset", at_least=1)
    if "datasets" in calls:
        section.compare(work, case=work, ours="rlio", beside="datasets")


def _rlio(root: str, options: dict[str, Any]) -> None:
    with rlio.DatasetReader(
        root, epochs=1, shuffle=False, cache="none", batch_size=_SHARD_ROWS, storage_options=options
    ) as reader:
        for _ in reader:
            pass


def _pyarrow(root: str, options: dict[str, Any]) -> None:
    import pyarrow.dataset
    import s3fs

    folder = root.removeprefix("s3://") + "/data"
    found = pyarrow.dataset.dataset(folder, filesystem=s3fs.S3FileSystem(**options), format="parquet")
    for _ in found.to_batches(batch_size=_SHARD_ROWS):
        pass


def _hugging_face(root: str, options: dict[str, Any]) -> None:
    import datasets
    import s3fs

    files = [f"s3://{path}" for path in s3fs.S3FileSystem(**options).glob(f"{root}/data/**/*.parquet")]
    found = datasets.load_dataset(
        "parquet", data_files=files, split="train", streaming=True, storage_options=options
    )
    for _ in found.with_format("numpy").iter(batch_size=_SHARD_ROWS):
        pass
