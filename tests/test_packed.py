"""Packed columns: every array comes back, and nothing in a stream is ever run."""

import base64
import contextlib
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import rlio
from rlio.errors import CorruptData, UnknownLayout, UnsafeData
from rlio.formats.files import packed
from rlio.formats.files.allowance import Allowance
from rlio.formats.files.packed import is_packed, unpack
from rlio.limits import Limits

OF_2019 = Path(__file__).with_name("golden") / "formats/rllib-2019"


def pack_stream(stream: bytes, **options: Any) -> str:
    return base64.b64encode(lz4.frame.compress(stream, **options)).decode("ascii")


def pack(value: Any, protocol: int = 5) -> str:
    """What RLlib's own `pack` makes of ``value``."""
    return pack_stream(pickle.dumps(value, protocol))


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for left, right in zip(found, expected, strict=True):
            assert_same(left, right)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.flags.writeable
        if expected.dtype == object:
            assert_same(found.ravel().tolist(), expected.ravel().tolist())
        else:
            np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected or (found != found and expected != expected)


NAMES = ["b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", ">i4", ">f8"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_dtype_comes_back_from_every_protocol(protocol: int) -> None:
    values = np.arange(6).reshape(3, 2) % 2
    for name in [*NAMES, "U3", "S3", "M8[ns]", "m8[25s]", "M8[D]"]:
        array = values.astype(bool) if name == "b1" else values.astype(name)
        assert_same(unpack(pack(array, protocol)), array)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_memory_order_shape_and_strides_do_not_matter(protocol: int) -> None:
    cube = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    arrays = [cube, np.asfortranarray(cube), cube.transpose(1, 0, 2), cube[:, ::2], cube[::-1], cube[:0]]
    arrays += [np.float64(3.5) * np.ones(()), np.zeros((2, 0, 3))]
    if protocol == 2:  # Empty bytes are a call of another function there; nobody has written such a file.
        arrays = [array for array in arrays if array.size]
    for array in arrays:
        assert_same(unpack(pack(array, protocol)), array)


def test_nested_observations_and_objects_come_back() -> None:
    value = {
        "image": np.zeros((4, 2, 2), np.uint8),
        "parts": (np.arange(4.0), [np.arange(4), np.array(["a", "b", "c", "d"])]),
        "infos": np.array([{"lives": 3, "x": np.float32(0.5), 7: None}, {}, {"n": [1.5, True]}, {}], object),
        "bytes": b"abc",
    }
    for protocol in (4, 5):
        assert_same(unpack(pack(value, protocol)), value)


def test_a_list_of_infos_comes_back() -> None:
    infos = [{"a": 1}, {}, {"a": np.arange(3)}]
    assert_same(unpack(pack(infos)), infos)


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(
        dtype=st.sampled_from([np.dtype(name) for name in NAMES]),
        shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    ),
    st.sampled_from([3, 4, 5]),
    st.booleans(),
)
def test_any_array_comes_back(array: np.ndarray, protocol: int, fortran: bool) -> None:
    assert_same(unpack(pack(np.asarray(array, order="F" if fortran else "C"), protocol)), array)


def read(text: str, *, seen: bool) -> tuple[Any, int, int] | str:
    """The value of a text, and what of an allowance it left; or its error."""
    if not seen:
        packed._SEEN.clear()
    allowance = Allowance()
    try:
        return unpack(text, allowance=allowance), allowance.bytes, allowance.values
    except CorruptData as error:
        return f"{type(error)}{error}"


@pytest.mark.further
@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([3, 4, 5]), st.sampled_from(["C", "F", "A"]))
def test_arrays_of_one_shape_that_follow_each_other_are_those_that_were_packed(
    data: st.DataObject, protocol: int, order: Any
) -> None:
    shape = (8, *data.draw(hnp.array_shapes(max_dims=3, max_side=4)))
    kind = np.dtype(data.draw(st.sampled_from(NAMES)))
    arrays = [data.draw(hnp.arrays(kind, shape)).copy(order).swapaxes(0, 1) for _ in range(3)]
    texts = [pack(array, protocol) for array in arrays]
    alone = [read(text, seen=False) for text in texts]
    packed._SEEN.clear()
    for text, array, expected in zip(texts, arrays, alone, strict=True):
        found = read(text, seen=True)
        assert_same(found[0], array)
        assert found[1:] == expected[1:]
        assert found[0].strides == expected[0].strides
    assert sum(map(len, packed._SEEN.values())) == (arrays[0].nbytes >= 64)


@pytest.mark.further
@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from([3, 5]), st.sampled_from(["?", ">f4"]))
def test_a_damaged_stream_is_read_alike_after_a_sound_one(
    data: st.DataObject, protocol: int, kind: str
) -> None:
    sound = pickle.dumps(np.ones(64, kind), protocol)
    stream = bytearray(sound)
    stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    alone = read(pack_stream(bytes(stream)), seen=False)
    read(pack_stream(sound), seen=False)
    assert repr(read(pack_stream(bytes(stream)), seen=True)) == repr(alone)


def test_bytes_that_are_no_part_of_the_array_are_never_taken_for_it() -> None:
    def stream(unused: bytes, numbers: bytes) -> bytes:
        whole = pickle.dumps(np.frombuffer(numbers, np.uint8), 3)
        # `_reconstruct` is called with further arguments, which it does not use.
        called = b"C\x01b"
        assert whole.count(called) == 1
        return whole.replace(called, b"C" + bytes([len(unused)]) + unused)

    texts = [pack_stream(stream(bytes([n]) * 80, bytes([9]) * 80)) for n in range(3)]
    for text in texts:
        assert unpack(text).tolist() == [9] * 80


def test_an_array_that_is_named_again_takes_no_memory_and_cannot_be_written() -> None:
    one, other = np.arange(3.0), np.arange(4.0)
    first, second, third = unpack(pack([one, one, other]))
    assert np.shares_memory(first, second)
    assert not first.flags.writeable
    assert not second.flags.writeable
    assert third.flags.writeable
    np.testing.assert_array_equal(second, one)


def test_each_mention_of_an_array_counts_as_its_bytes() -> None:
    array = np.zeros(1 << 20, np.uint8)
    text = pack([array] * 20)
    size = len(pickle.dumps([array] * 20, 5))
    assert len(unpack(text, allowance=Allowance(Limits(group_bytes=size + (20 << 20))))) == 20
    with pytest.raises(UnsafeData):
        unpack(text, allowance=Allowance(Limits(group_bytes=size + (20 << 20) - 1)))


def test_columns_share_one_allowance() -> None:
    text, allowance = pack(list(range(100))), Allowance(Limits(packed_values=500))
    unpack(text, allowance=allowance)
    unpack(text, allowance=allowance)
    with pytest.raises(UnsafeData):
        unpack(text, allowance=allowance)


@pytest.mark.each_value_once
@pytest.mark.parametrize("rows", [1, 1_000, 10_000, 1_000_000])
@pytest.mark.parametrize(
    "options", [{}, {"store_size": False}, {"content_checksum": True}, {"block_size": 6}]
)
def test_columns_of_every_size_are_known_as_packed(rows: int, options: dict[str, Any]) -> None:
    array = np.arange(rows)
    text = pack_stream(pickle.dumps(array, 5), **options)
    assert is_packed(text)
    assert_same(unpack(text), array)


def test_only_text_that_rllib_packed_counts_as_packed() -> None:
    assert is_packed(pack(np.zeros(3)))
    assert not any(
        is_packed(value) for value in ("CartPole-v1", "", "BCJN", b"BCJNGGhA", None, 3, ["BCJNGGhA"])
    )


def test_arrays_over_one_buffer_share_no_memory() -> None:
    buffer = b"\x96" + struct.pack("<Q", 4) + bytes(4) + b"\x94"
    head = global_op("numpy._core.numeric", "_frombuffer") + b"("
    tail = global_op("numpy", "dtype") + text_op("u1") + b"\x85R" + b"K\x04\x85" + text_op("C") + b"tR"
    first, second = unpack(stream_of(head, buffer, tail, head, b"h\x00", tail, b"\x86"))
    first[:] = 7
    assert second.tolist() == [0, 0, 0, 0]


# ---- hostile streams ----


class Attack:
    """Pickles into a call of ``function`` with ``arguments``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


TOUCH = "__import__('pathlib').Path({!r}).touch()"


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("function", "argument"),
    [(os.system, "touch {}"), (eval, TOUCH), (exec, TOUCH), (os.mkdir, "{}")],
    ids=["os.system", "eval", "exec", "os.mkdir"],
)
def test_a_stream_that_calls_a_function_is_refused_and_runs_nothing(
    tmp_path: Any, function: Any, argument: str, protocol: int
) -> None:
    proof = tmp_path / "proof"
    text = pack({"obs": Attack(function, argument.format(str(proof)))}, protocol)
    pickle.loads(lz4.frame.decompress(base64.b64decode(text)))
    assert proof.exists(), "the attack itself does not work, so that refusing it proves nothing"
    (proof.rmdir if proof.is_dir() else proof.unlink)()
    with pytest.raises(UnsafeData, match=r"global|opcode"):
        unpack(text)
    assert not proof.exists()


def stream_of(*opcodes: bytes) -> str:
    return pack_stream(b"\x80\x05" + b"".join(opcodes) + b".")


def text_op(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def global_op(module: str, name: str) -> bytes:
    return text_op(module) + text_op(name) + b"\x93"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("numpy", "load"),
        ("numpy", "dtype.__init__"),
        ("numpy.core.multiarray", "fromfile"),
        ("numpy._core.numeric", "_frombuffer.__globals__"),
        ("_codecs", "decode"),
        ("copyreg", "_reconstructor"),
    ],
)
def test_the_error_names_the_global(module: str, name: str) -> None:
    with pytest.raises(UnsafeData, match=f"{module}.{name}"):
        unpack(stream_of(global_op(module, name)))


def test_globals_that_are_read_are_useless_on_their_own() -> None:
    dtype = global_op("numpy", "dtype")
    for text in (
        stream_of(dtype),
        stream_of(dtype, text_op("O"), b"\x85R"),
        stream_of(dtype, text_op("f4"), b"\x85R"),
        stream_of(dtype, text_op("os.system"), b"\x85R"),
        stream_of(dtype, text_op("i4,O"), b"\x85R"),
        stream_of(dtype, b"]", b"\x85R"),
        stream_of(dtype, b")R"),
        stream_of(global_op("numpy", "ndarray"), text_op("x"), b"\x85R"),
        stream_of(global_op("_codecs", "encode"), text_op("x"), text_op("rot13"), b"\x86R"),
        stream_of(global_op("numpy._core.multiarray", "_reconstruct"), dtype, b")\x8c\x01b\x87R"),
        stream_of(b"}", b"N", b"b"),
        stream_of(dtype, b"N", b"b"),
    ):
        with pytest.raises(CorruptData):
            unpack(text)


def test_a_structured_or_subarray_dtype_is_refused() -> None:
    with pytest.raises(UnsafeData, match="dtype"):
        unpack(pack(np.zeros(2, [("a", "f4"), ("b", object)])))
    with pytest.raises(UnsafeData, match="dtype"):
        unpack(pack(np.zeros(2, "V8")))


def array_stream(buffer: bytes, dtype: str, shape: bytes) -> str:
    made = global_op("numpy", "dtype") + text_op(dtype) + b"\x85R"
    data = b"B" + struct.pack("<I", len(buffer)) + buffer
    call = global_op("numpy._core.numeric", "_frombuffer") + b"(" + data + made + shape + text_op("C") + b"tR"
    return stream_of(call)


def integer(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


@pytest.mark.parametrize(
    ("buffer", "dtype", "shape"),
    [
        (b"\0" * 8, "f4", integer(3) + b"\x85"),
        (b"\0" * 8, "f4", integer(2**40) + b"\x85"),
        (b"\0" * 8, "f4", integer(-2) + b"\x85"),
        (b"", "f4", integer(2**39) + integer(2**39) + integer(0) + b"\x87"),
        (b"", "f4", integer(0) + integer(2**33) + b"\x86"),
        (b"\0" * 8, "f4", text_op("2") + b"\x85"),
        (b"\0" * 8, "f4", b"N"),
        (b"\0" * 8, "O", integer(1) + b"\x85"),
        (b"\x02", "b1", integer(1) + b"\x85"),
        (b"\xff" * 4, "U1", integer(1) + b"\x85"),
        (b"\0" * 7, "f4", integer(1) + b"\x85"),
        (b"\0" * 8, "U0", integer(1) + b"\x85"),
    ],
)
def test_an_array_whose_shape_does_not_fit_its_bytes_is_refused(
    buffer: bytes, dtype: str, shape: bytes
) -> None:
    with pytest.raises(CorruptData, match="packed column"):
        unpack(array_stream(buffer, dtype, shape))


def test_a_stream_of_nested_references_cannot_multiply() -> None:
    bomb: list[Any] = [1]
    for _ in range(25):  # Two references each level: 2**25 values when spelled out.
        bomb = [bomb, bomb]
    with pytest.raises(UnsafeData, match="packed_values"):
        unpack(pack(bomb), allowance=Allowance(Limits(packed_values=100_000)))
    array = np.zeros(1 << 20, np.uint8)
    with pytest.raises(UnsafeData, match="group_bytes"):
        unpack(pack([array] * 1000), allowance=Allowance(Limits(group_bytes=32 << 20)))


def test_deep_nesting_and_cycles_are_refused() -> None:
    deep: Any = 1
    for _ in range(100):
        deep = (deep,)
    with pytest.raises(UnsafeData, match="deep"):
        unpack(pack(deep))
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(UnsafeData, match="deep"):
        unpack(pack(cycle))


def test_keys_that_could_collide_are_refused() -> None:
    for key in (2**61, 1.5, (1, 2), b"x"):
        with pytest.raises(UnsafeData, match="key"):
            unpack(pack({key: 1}))


def test_more_opcodes_than_the_limit_are_refused() -> None:
    with pytest.raises(UnsafeData, match="packed_values"):
        unpack(pack(list(range(1000))), allowance=Allowance(Limits(packed_values=500)))


@pytest.mark.parametrize("stated", [True, False])
def test_a_frame_that_inflates_memory_is_refused_before_it_does(stated: bool) -> None:
    zeros = pack_stream(bytes(5_000_000), store_size=stated)
    with pytest.raises(UnsafeData, match="bytes"):
        unpack(zeros, allowance=Allowance(Limits(group_bytes=1_000_000)))


def test_a_frame_that_states_a_wrong_size_is_damaged() -> None:
    frame = bytearray(lz4.frame.compress(pickle.dumps(np.zeros(100), 5)))
    frame += lz4.frame.compress(b"more")
    with pytest.raises(CorruptData, match="states"):
        unpack(base64.b64encode(frame).decode())


def test_a_text_cut_anywhere_is_damaged_and_never_half_read() -> None:
    text = pack({"obs": np.arange(50.0)})
    for length in range(0, len(text), 7):
        with pytest.raises(CorruptData):
            unpack(text[:length])
    stream = pickle.dumps({"obs": np.arange(50.0)}, 5)
    for length in range(len(stream)):
        with pytest.raises(CorruptData):
            unpack(pack_stream(stream[:length]))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_streams_raise_the_one_error_or_read_as_data(data: st.DataObject) -> None:
    stream = bytearray(pickle.dumps({"a": np.arange(6, dtype=">i2"), "b": [np.float32(1), "x"]}, 5))
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptData):
        unpack(pack_stream(bytes(stream)))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80))
def test_random_streams_raise_the_one_error_or_read_as_data(stream: bytes) -> None:
    with contextlib.suppress(CorruptData):
        unpack(pack_stream(stream))


def test_the_module_never_names_the_dangerous_loader() -> None:
    with open(packed.__file__, encoding="utf-8") as file:
        source = file.read()
    assert "import pickle\n" not in source
    assert "getattr(" not in source
    assert "import_module" not in source


def values_of_2019() -> Iterator[tuple[str, str, str]]:
    """(version of ray, name, packed value) of each that a version of 2019 packed."""
    for file in sorted(OF_2019.glob("packed-*.txt")):
        for line in file.read_text().splitlines():
            name, text = line.split()
            yield file.stem.removeprefix("packed-"), name, text


def test_arrays_of_2019_are_those_that_were_packed() -> None:
    arrays: dict[str, Any] = {
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.array(7.5),
        "fortran": np.arange(6.0).reshape(2, 3),
        "strided": np.arange(24.0).reshape(4, 6)[::2, ::2],
        "big": np.random.RandomState(0).rand(50, 7),
    }
    seen = set()
    for version, name, text in values_of_2019():
        assert is_packed(text)
        if name in ("bool", "dict", "list", "number", "objects", "text"):
            with pytest.raises(UnknownLayout, match=r"pyarrow\.serialize"):
                unpack(text)
            continue
        expected = arrays[name] if name in arrays else np.arange(6).reshape(2, 3).astype(name)
        assert_same(unpack(text), expected)
        seen.add((version, name))
    assert len(seen) == 16 + 4 * 2


def test_a_recording_of_2019_is_read() -> None:
    with rlio.read(OF_2019, epochs=1) as reader:
        rows: Any = rlio.concat_samples(list(reader))
    values = np.array([0, 1, 2, 3, 10, 11, 12])
    for name, at in (("obs", values), ("new_obs", values + 1)):
        expected = np.stack([at, -at, at / 3], 1).astype(np.float32)
        assert rows[name].dtype == np.float32
        assert (rows[name] == expected).all()
    assert rows["actions"].tolist() == (values % 5).tolist()
    assert rows["rewards"].tolist() == (values + 0.5).tolist()
    assert np.flatnonzero(rows["terminateds"]).tolist() == [3, 6]


@pytest.mark.further
def test_damaged_messages_of_2019_raise_the_one_error_or_read_as_data() -> None:
    """In a child: Arrow, and not rlio, reads the tensor."""
    script = """
import base64, contextlib, sys
import lz4.frame, numpy as np, pyarrow as pa
from rlio.errors import CorruptData, UnknownLayout
from rlio.formats.files.packed import unpack

read = 0
for text in sys.stdin.read().split():
    good = lz4.frame.decompress(base64.b64decode(text))
    starts = range(len(good)) if len(good) < 1000 else range(400, 700)
    for place in starts:
        for value in {0, 255, good[place] ^ 1, good[place] ^ 128}:
            bad = bytearray(good)
            bad[place] = value
            with contextlib.suppress(CorruptData, UnknownLayout):
                found = unpack(base64.b64encode(lz4.frame.compress(bytes(bad))).decode())
                assert found.nbytes <= len(good)
                found.sum()
                read += 1
    for length in range(len(good)):
        with contextlib.suppress(CorruptData, UnknownLayout):
            unpack(base64.b64encode(lz4.frame.compress(good[:length])).decode())
print(read)
"""
    texts = [text for _, name, text in values_of_2019() if name == "uint8"]
    child = subprocess.run(
        [sys.executable, "-c", script], input="\n".join(texts), capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) > 0  # Values and unused bytes may be anything.


def test_a_tensor_of_2019_that_repeats_its_values_is_refused() -> None:
    text = next(text for version, name, text in values_of_2019() if (version, name) == ("0.7.6", "big"))
    good = lz4.frame.decompress(base64.b64decode(text))
    for old, new in ((50, 10**6), (56, 0)):  # A length and its stride.
        assert good.count(struct.pack("<q", old), 448, 720) == 1
        good = good.replace(struct.pack("<q", old), struct.pack("<q", new), 1)
    with pytest.raises(CorruptData, match="1000000"):
        unpack(pack_stream(good))


def test_the_allowance_counts_tensors_of_2019() -> None:
    texts = {name: text for version, name, text in values_of_2019() if version == "0.7.6"}
    allowance = Allowance(Limits(group_bytes=10_000))
    unpack(texts["big"], allowance=allowance)  # 3520 bytes of message, 2800 of values.
    with pytest.raises(UnsafeData):
        unpack(texts["big"], allowance=allowance)


def test_what_is_no_array_of_2019_is_refused_by_name_and_damage_is_not_taken_for_it() -> None:
    # What pyarrow.serialize wrote begins with the numbers of tensors and of buffers.
    for counts in ((1, 0), (0, 1, 2), (3, 0, 0, 1)):
        with pytest.raises(UnknownLayout, match=r"pyarrow\.serialize"):
            unpack(pack_stream(np.array(counts, "<i4").tobytes() + b"\xff\xff\xff\xff"))
    for damaged in (b"", b"\x01", b"\x80\x05\x00\x00\x01\x00\x00\x00", b"nothing of the kind"):
        with pytest.raises(CorruptData):
            unpack(pack_stream(damaged))
