"""Stored states, checkpoints and stores that no version wrote: errors of rlio, in bounded memory."""

from __future__ import annotations

import copy
import io
import json
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counter_env import episode
from further import further
from saved_stores import STORES, sampler_of

import rlio
from rlio.batch.npz import pack_arrays, unpack_arrays
from rlio.errors import CorruptData, RlioError, StateError, UnsafeData
from rlio.policies.checkpoint import load_state, pack_state, save_state, unpack_state
from rlio.replay.manifests import Manifest

#: Bytes that reading a small file may take.
BOUND = 4 << 20


def takes_little(act: Callable[[], object], error: type[Exception]) -> None:
    """Check that something raises an error, and takes no more memory than a small file may."""
    tracemalloc.start()
    try:
        with pytest.raises(error):
            act()
        assert tracemalloc.get_traced_memory()[1] < BOUND
    finally:
        tracemalloc.stop()


def unpacked(text: bytes | None, data: bytes) -> dict[str, Any]:
    return unpack_state(text, data, uri_of=str)


# ---- state.json ----

ARRAYS = pack_arrays({"a0": np.zeros(3)})


def text_of(state: Any) -> bytes:
    """``state.json`` as a version before the present one wrote it: `ARRAYS` do not hold the text."""
    return json.dumps({"format": 0, "arrays_crc32": zlib.crc32(ARRAYS), "state": state}).encode()


@pytest.mark.parametrize(
    "value",
    [
        *({"$array": name} for name in ({}, [], None, 3, "a1")),
        *({"$tensor": name} for name in ({}, "a1")),
        *({"$items": pairs} for pairs in (3, [1], [[1]], [[[], 1]], [[1.5, 1]], {"a": 1}, "ab")),
        *({"$float": number} for number in ([], {}, None, "x")),
    ],
    ids=str,
)
def test_what_stands_for_no_value_is_damage(value: Any) -> None:
    for state in (value, {"x": value}, {"x": [{"y": value}]}):
        with pytest.raises(CorruptData):
            unpacked(text_of(state), ARRAYS)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"null",
        b"[]",
        b'{"format":0}',
        b'{"format":{},"state":{}}',
        b'{"format":0,"state":[],"arrays_crc32":0}',
        b"9" * 5000,
        b"[" * 1_000_000,
        b'{"a":' * 100_000,
        text_of({}).replace(b"{}", b'{"x":' + b"[" * 3000 + b"]" * 3000 + b"}"),
        text_of({}).replace(b"{}", b'{"x":' + b'{"y":' * 900 + b"1" + b"}" * 901),
    ],
    ids=lambda text: f"{text[:24]}{len(text)}",
)
def test_text_that_is_no_state_or_nests_deeply_is_damage(text: bytes) -> None:
    """Deep lists ended in a RecursionError."""
    takes_little(lambda: unpacked(text, ARRAYS), CorruptData)


def test_a_changed_bit_of_a_stored_state_is_found_or_changes_nothing() -> None:
    """A digit of state.json could change unnoticed: only the arrays had a checksum."""
    text, data = pack_state({"weights": np.arange(5.0), "step": 1234567, "name": "x"})
    expected = unpacked(text, data)
    for name, stored in (("text", text), ("data", data)):
        for bit in range(0, 8 * len(stored), 3):
            changed = bytearray(stored)
            changed[bit // 8] ^= 1 << bit % 8
            try:
                found = unpacked(bytes(changed), data) if name == "text" else unpacked(text, bytes(changed))
            except CorruptData:
                continue
            np.testing.assert_equal(found, expected)


# ---- arrays.npz ----


def archive(compression: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as made:
        for name, content in members.items():
            made.writestr(f"{name}.npy", content)
    return file.getvalue()


def array(shape: str, descr: str = "'<f8'", *, body: bytes = b"", version: int = 1) -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes((version, 0)) + length + header + body


@pytest.mark.few(1)
@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_that_unpacks_to_much_is_refused_before_it_does(compression: int) -> None:
    """697 bytes took 788 MB."""
    data = archive(compression, w=array("(2097152,)", body=bytes(16 << 20)))
    assert len(data) < 20_000
    takes_little(lambda: unpack_arrays(data, uri="x"), UnsafeData)


@pytest.mark.few(10)
@pytest.mark.parametrize(
    "member",
    [
        array("(98500000,)"),
        array("(1000000000000000000000000,)"),
        array("(-1, -8)", body=bytes(64)),
        array("('x',)", body=bytes(8)),
        array("(1.0,)", body=bytes(8)),
        array("(1,)", "'|O'", body=bytes(8)),
        array("(1,)", "[('a', '|O')]", body=bytes(8)),
        array("(1,)", "'V99999999999999'"),
        array("(1,)", "[('a', '<f8', -3)]"),
        array(f"({'-' * 9000}1,)"),
        array(f"({'-' * 9000}1,)", version=3),
        array(f"({'-' * 60000}1,)"),
        array("[" * 5000),
        array("(1L, "),
        array("(2,)", version=9, body=bytes(16)),
        b"\x93NUMPY\x03\x00\xff\xff\xff\xff{}",
        b"\x93NUMPY\x03\x00\x02\x00\x00\x00[]",
        b"\x93NUMPY\x01\x00\x08\x00\n  a\n b\n",
        b"\x93NUMPY\x01\x00\x04\x00\x00\x00\x00\x00",
        b"",
    ],
    ids=lambda member: f"{member[8:60]!r}{len(member)}",
)
def test_an_array_that_is_not_what_its_header_claims_is_damage(member: bytes) -> None:
    takes_little(lambda: unpack_arrays(archive(w=member), uri="x"), CorruptData)


@pytest.mark.parametrize(
    "data", [b"", b"junk", b"PK\x03\x04", b"PK\x05\x06" + bytes(18), array("(0,)")], ids=str
)
def test_bytes_that_are_no_archive_of_a_state_are_damage(data: bytes) -> None:
    for text in (None, text_of({})):
        with pytest.raises(CorruptData):
            unpacked(text, data)


def test_arrays_of_every_kind_come_back() -> None:
    arrays: dict[str, Any] = {
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "empty": np.zeros((3, 0), ">f4"),
        "scalar": np.array(2.5),
        "text": np.array(["a", "é"]),
        "nothing": np.zeros(2, "V0"),
        "time": np.array([1, 2], "M8[s]"),
        "fields": np.zeros(2, [("a", "f4"), ("b", "i2", (2,))]),
    }
    found = unpack_arrays(pack_arrays(arrays), uri="x")
    for name, values in arrays.items():
        np.testing.assert_array_equal(found[name], values)
        assert found[name].dtype == values.dtype
        assert found[name].flags.writeable


class Deep(list[Any]):
    """A list that contains itself."""

    def __init__(self) -> None:
        super().__init__()
        self.append(self)


@pytest.mark.parametrize(
    "value",
    [
        np.ma.masked_array([1, 2], [False, True]),
        np.zeros(2, [("a", object)]),
        np.longdouble(1),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64).conj(),
        10**5000,
        1j,
        b"bytes",
        Deep(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_could_not_be_loaded_is_not_saved(value: Any, tmp_path: Path) -> None:
    """A masked array came back without its mask; others ended in errors of NumPy, torch and json."""
    save_state(tmp_path, {"x": 1})
    with pytest.raises(StateError):
        save_state(tmp_path, {"x": value})
    assert load_state(tmp_path) == {"x": 1}


# ---- checkpoint.json ----


def test_a_hostile_pointer_is_damage(tmp_path: Path) -> None:
    rlio.save_checkpoint(tmp_path, step=1, rng=np.random.default_rng(0))
    path = tmp_path / "checkpoint.json"
    good = json.loads(path.read_text())
    for changed in (
        *({**good, "newest": name} for name in ("..", "../../etc", "a" * 32 + "/..", 3, None, {}, "A" * 32)),
        *({**good, "parts": parts} for parts in ([], None, {"step": 1}, {"step": {}})),
        {**good, "parts": {**good["parts"], "x": "value"}},
        {**good, "parts": {**good["parts"], "x": "store"}},
        *({**good, "stores": stores} for stores in (["x"], None, 3, [{}])),
        *({**good, "format": version} for version in (0, 3, None, [])),
        *({key: good[key] for key in good.keys() - {lost}} for lost in good),
    ):
        path.write_text(json.dumps(changed))
        with pytest.raises(CorruptData):
            rlio.load_checkpoint(tmp_path, rng=np.random.default_rng(0))
    for text in ("", "[", "[" * 1_000_000, "null"):
        path.write_text(text)
        takes_little(lambda: rlio.load_checkpoint(tmp_path), CorruptData)


# ---- stores ----


def places(state: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value in a state, with its place."""
    yield at, state
    for key, value in (
        state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    ):
        yield from places(value, (*at, key))


def changed_at(state: Any, at: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(state)
    inner = made
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return made


@pytest.mark.parametrize("name", ["agents", *further("whole_episodes")])
def test_a_manifest_of_a_store_with_a_wrong_value_is_an_error(name: str, tmp_path: Path) -> None:
    store = STORES[name]()
    store.save(tmp_path, priorities=sampler_of(store) if name == "whole_episodes" else None)
    path = tmp_path / "store.json"
    good = Manifest.load(path.read_bytes())
    fields = {"describe": dict(good.describe), "arrays": dict(good.arrays), "state": dict(good.state)}
    tried = 0
    for at, value in places(fields):
        # Its keys are those of streams, of any type, and a store without frames or texts has none of them.
        if (
            len(at) < 2
            or "open" in at
            or at == ("state", "priorities")
            or at[:2] == ("state", "of")  # Compared with the sampler that gets the priorities.
            or at[-1] in ("frames", "texts", "dtypes")
            or value in ({}, [])
        ):
            continue
        for wrong in ("x", -1, 10**30, [], {}, 1.5):
            if type(wrong) is type(value) is str:
                continue
            path.write_bytes(Manifest(**changed_at(fields, at, wrong)).dump())
            with pytest.raises(RlioError):
                rlio.ReplayStore.load(tmp_path).close()
            tried += 1
    assert tried > 100
    path.write_bytes(good.dump())
    assert len(rlio.ReplayStore.load(tmp_path)) == len(store)


def test_a_changed_byte_of_a_saved_store_is_found(tmp_path: Path) -> None:
    """The changed row was drawn."""
    store = STORES["whole_episodes"]()
    store.save(tmp_path)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    for path in folder.iterdir():
        data = path.read_bytes()
        for at in range(0, len(data), 997):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(CorruptData):
                rlio.ReplayStore.load(tmp_path)
        path.write_bytes(data)
    assert len(rlio.ReplayStore.load(tmp_path)) == len(store)


# ---- states of what is not stored here ----


def test_a_following_state_of_many_ranks_takes_no_memory(tmp_path: Path) -> None:
    """`world` of 10**12 was counted, rank by rank."""
    with rlio.ParquetWriter(tmp_path) as writer:
        writer.write(episode(0, 0, 9))
    with rlio.FollowingReplay(tmp_path, capacity=99, batch_size=4, seed=1) as replay:
        replay.sample()
        state = replay.state_dict()
        for wrong in (
            {"world": 10**12},
            {"world": 10**12, "slots": 10**12},
            {"world": 0, "ranks": []},
            {"ranks": [1.0]},
            {"ranks": [-1]},
            {"ranks": [0, 0]},
        ):
            bad = {**state, "position": {**state["position"], **wrong}}
            takes_little(lambda: replay.load_state_dict(bad), StateError)  # noqa: B023
            takes_little(lambda: rlio.FollowingReplay.merge_states([bad]), StateError)  # noqa: B023


@pytest.mark.parametrize(
    ("kind", "place", "value"),
    [
        (np.random.Philox, ("buffer_pos",), 100),
        (np.random.MT19937, ("state", "pos"), 10_000),
        (np.random.PCG64, ("has_uint32",), 7),
        (np.random.PCG64, ("state", "state"), 1.5),
        (np.random.SFC64, ("state", "state"), np.zeros(3, np.uint64)),
        (np.random.Philox, ("state", "key"), ["x", 1]),
        (np.random.PCG64, ("bit_generator",), "MT19937"),
    ],
)
def test_a_generator_reads_no_memory_beyond_its_own(
    tmp_path: Path, kind: Any, place: Any, value: Any
) -> None:
    """NumPy takes any position in a generator's buffer, and reads there."""
    rng = np.random.Generator(kind(1))
    state = changed_at(rng.bit_generator.state, place, value)
    rlio.save_checkpoint(tmp_path, rng=rng)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    save_state(folder / "states", {"rng": state})
    before = rng.bit_generator.state
    with pytest.raises(StateError):
        rlio.load_checkpoint(tmp_path, rng=rng)
    np.testing.assert_equal(rng.bit_generator.state, before)


def test_a_module_or_optimizer_of_another_shape_is_a_state_error(tmp_path: Path) -> None:
    """torch's RuntimeError came through; an optimizer took the state, and failed at its next step."""

    def made(width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        module = torch.nn.Linear(3, width)
        optimizer = torch.optim.Adam(module.parameters())
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return module, optimizer

    module, optimizer = made(2)
    rlio.save_checkpoint(tmp_path, module=module, optimizer=optimizer)
    rlio.load_checkpoint(tmp_path, module=module, optimizer=optimizer)
    other, others = made(4)
    with pytest.raises(StateError, match="size mismatch"):
        rlio.load_checkpoint(tmp_path, module=other)
    with pytest.raises(StateError, match="shape"):
        rlio.load_checkpoint(tmp_path, optimizer=others)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(StateError):
        rlio.load_checkpoint(tmp_path, module=torch.nn.Linear(3, 2, bias=False))
