"""Helpers of the tests of stored data: fresh roots, comparison to the bit, small row groups."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import numpy as np
import pytest
from gymnasium.spaces import GraphInstance

from rlio import DatasetReader, MultiAgentBatch, ParquetWriter, Roll, SampleBatch, concat_samples
from rlio.batch import Batch
from rlio.batch.arrays import object_column, to_numpy
from rlio.batch.nested import leaves

_WORDS = ["", "a", "žluť", "🙂", "line\nbreak", "nul\0inside", '"quoted"']
_MARKER = re.compile(r"/_(sealed|trim)-\d+$")


def fresh_root() -> str:
    """A root in memory that nobody else has."""
    return f"memory://{uuid.uuid4().hex}"


@contextmanager
def group_bytes(limit: int) -> Iterator[None]:
    """Row groups of at most ``limit`` bytes, so that few rows make many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlio.schemas.schema._GROUP_BYTES", limit)
        patch.setattr("rlio.schemas.schema._PICTURE_GROUP_BYTES", limit)
        yield


def store(*batches: Batch, root: str | None = None, **options: Any) -> str:
    """Write batches in one go and give the root."""
    root = root or fresh_root()
    options.setdefault("roll", Roll(max_seconds=None))
    with ParquetWriter(root, **options) as writer:
        for batch in batches:
            writer.write(batch)
    return root


def load(root: str, **options: Any) -> Any:
    """Read one epoch and join it."""
    options.setdefault("epochs", 1)
    with DatasetReader(root, **options) as reader:
        return concat_samples(list(reader))


def round_trip(*batches: Batch, **options: Any) -> Any:
    """Write, and read in recorded order."""
    return load(store(*batches), **options)


def files(root: str, below: str = "data") -> dict[str, bytes]:
    """Path -> bytes of the objects of a root in memory; of its data, the shards alone, not the markers."""
    fs = fsspec.filesystem("memory")
    found = fs.find(f"{root}/{below}") if fs.exists(f"{root}/{below}") else []
    return {
        str(path): fs.cat_file(path) for path in found if below != "data" or not _MARKER.search(str(path))
    }


def put(path: str, data: bytes) -> None:
    """Overwrite or add an object in memory."""
    fsspec.filesystem("memory").pipe_file(path, data)


def remove(path: str) -> None:
    """Take an object in memory away."""
    fsspec.filesystem("memory").rm_file(path)


def assert_identical(found: Any, expected: Any) -> None:
    """Check kinds, order of columns, dtypes, shapes, and every bit; the width of texts is no type."""
    assert type(found) is type(expected)
    if isinstance(expected, MultiAgentBatch):
        present = {pid for pid, part in expected.items() if len(part)}
        assert set(found) == present
        for pid in present:
            assert_identical(found[pid], expected[pid])
        return
    assert list(found) == list(expected)
    for name in expected:
        ours, theirs = leaves(found[name]), leaves(expected[name])
        assert [path for path, _ in ours] == [path for path, _ in theirs], name
        for (_, a), (_, b) in zip(ours, theirs, strict=True):
            assert_same_bits(a, to_numpy(b), name)


def assert_same_bits(found: np.ndarray, expected: np.ndarray, name: str) -> None:
    """Check two arrays; objects by type and value, NaN being equal to NaN."""
    if expected.dtype.kind in "US":
        assert found.dtype.str[:2] == expected.dtype.str[:2], name
        assert found.tolist() == expected.tolist(), name
        return
    assert found.dtype == expected.dtype, name
    assert found.dtype.str == expected.dtype.str, name
    assert found.shape == expected.shape, name
    if expected.dtype.kind == "O":
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert same_objects(a, b), (name, a, b)
        return
    assert found.tobytes() == np.ascontiguousarray(expected).tobytes(), name


def same_objects(a: Any, b: Any) -> bool:
    """Whether two values of an info agree in types, dtypes and values."""
    if type(a) is not type(b):
        return False
    if isinstance(b, np.ndarray):
        if b.dtype == object:
            flat = zip(a.reshape(-1), b.reshape(-1), strict=True)
            return a.shape == b.shape and all(same_objects(x, y) for x, y in flat)
        return (
            a.dtype.str == b.dtype.str
            and a.shape == b.shape
            # By their bytes where NumPy takes no dates for equal that are none.
            and (a.tobytes() == b.tobytes() or np.array_equal(a, b, equal_nan=b.dtype.kind in "fc"))
        )
    if isinstance(b, dict):
        return list(a) == list(b) and all(same_objects(a[key], b[key]) for key in b)
    if isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same_objects, a, b))
    if isinstance(b, float):
        return (a == b and np.signbit(a) == np.signbit(b)) or (a != a and b != b)
    return bool(a == b) or bool(a != a and b != b)


def with_other_ids(batch: Batch) -> Any:
    """The same rows of other episodes: a writer takes the rows of an ended episode once."""
    if isinstance(batch, MultiAgentBatch):
        parts = {pid: with_other_ids(part) for pid, part in batch.items()}
        return MultiAgentBatch(parts, batch.env_steps())
    if "eps_id" not in batch:
        return batch
    other = batch[:]
    other["eps_id"] = other["eps_id"] + 5000
    return other


def columns_of_parts(rows: int, first: int = 0) -> dict[str, np.ndarray]:
    """Columns whose rows have parts, of every structure that values show. All follow from its number."""

    def words(n: int) -> list[str]:
        return [_WORDS[(n + k) % len(_WORDS)] for k in range(n % 4)]

    numbers = range(first, first + rows)
    links = [np.array([[0, n % 2]] * (n % 3), np.int32).reshape(-1, 2) for n in numbers]
    return {
        "words": object_column(words(n) for n in numbers),
        "places": object_column(tuple(words(n)) for n in numbers),
        "blobs": object_column(bytes(range(n % 5)) + bytes(n % 3) for n in numbers),
        "names": object_column(np.array(words(n), np.str_) if n % 4 else np.empty(0, "<U1") for n in numbers),
        "tags": object_column(object_column(words(n)) for n in numbers),
        "sets": object_column(tuple(np.full(2, n, np.float32) for _ in range(n % 3)) for n in numbers),
        "ids": object_column((np.int64(n),) * (n % 3) for n in numbers),
        "talks": object_column([words(n), words(n + 1)][: n % 3] for n in numbers),
        "graphs": object_column(
            GraphInstance(
                np.full((2, 2), n, np.float32),
                np.full(len(link), n) if len(link) else None,
                link if len(link) else None,
            )
            for n, link in zip(numbers, links, strict=True)
        ),
    }


def numbered(rows: int, first: int = 0, **more: Any) -> SampleBatch:
    """Rows that know their number, in the column ``t``."""
    t = np.arange(first, first + rows)
    return SampleBatch({"t": t, "obs": (t[:, None] + np.zeros(3)).astype(np.float32), **more})
