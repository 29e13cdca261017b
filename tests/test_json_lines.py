"""JSON lines: batches of every form come back, and a line that is not the one written is refused."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.errors import CorruptData, MissingColumn, SchemaError, UnsafeData
from rlio.limits import Limits
from rlio.schemas import json_lines
from rlio.schemas.json_lines import (
    LineTooLarge,
    decode_line,
    encode_line,
    encode_provenance,
    is_intact,
    is_provenance,
    parse_head,
    parse_provenance,
)
from rlio.schemas.schema import Schema
from rlio.testing.readers import assert_same

Batch = SampleBatch | MultiAgentBatch


def objects(*values: Any) -> np.ndarray:
    column = np.empty(len(values), object)
    for index, value in enumerate(values):
        column[index] = value
    return column


def steps(rows: int, first: int = 0) -> SampleBatch:
    t = np.arange(first, first + rows)
    return SampleBatch(
        obs=(t[:, None] / np.float32(3)).astype(np.float32) + np.zeros((1, 3), np.float32),
        new_obs=np.full((rows, 3), np.nan, np.float32),
        actions=t % 4,
        rewards=(t / 7).astype(np.float64),
        terminateds=t % 5 == 4,
        eps_id=t // 5,
        t=t % 5,
    )


def nested(rows: int) -> SampleBatch:
    return SampleBatch(
        obs={
            "image": np.arange(rows * 12, dtype=np.uint8).reshape(rows, 2, 2, 3),
            "sensors": (np.arange(rows, dtype=np.float16), {"a/b": np.ones((rows, 1), ">f4")}),
            "text": np.array([f"zeile {i} \u2028 ü" for i in range(rows)], object),
        },
        actions=(np.arange(rows, dtype=np.int8), np.zeros((rows, 0), np.float32)),
        infos=objects(*({"p": np.float32([i, np.nan]), "q": ("x", None, i)} for i in range(rows))),
        dates=np.arange(rows).astype("M8[ms]"),
        phase=np.arange(rows) * 1j,
        key=np.array([b"ab", b"c\0d", b"", b"zz"][:rows]),
    )


def sequences(padded: bool = False) -> SampleBatch:
    batch = SampleBatch(
        obs=np.arange(12, dtype=np.float32).reshape(6, 2),
        rewards=np.arange(6, dtype=np.float32),
        seq_lens=np.array([3, 1, 2], np.int32),
        state_in_0=np.arange(6, dtype=np.float64).reshape(3, 2),
        max_seq_len=4,
        num_grad_updates=2.5,
    )
    return batch.right_zero_pad(4) if padded else batch


def agents() -> MultiAgentBatch:
    left, right = steps(4), nested(2)
    right["eps_id"], right["t"] = np.array([0, 0]), np.array([1, 2])
    return MultiAgentBatch({"left": left, "right/π": right}, 7)


def there_and_back(batch: Batch, schema: Schema | None = None, **options: Any) -> Batch:
    schema = schema or Schema.of(batch)
    line = encode_line(batch, schema, **options)
    assert b"\n" not in line
    assert is_intact(line)
    return decode_line(line, {schema.hash: schema}.__getitem__)


MAKERS: list[Callable[[], Batch]] = [
    lambda: steps(6),
    lambda: steps(1),
    lambda: steps(0),
    lambda: nested(4),
    sequences,
    agents,
    lambda: MultiAgentBatch({"default_policy": steps(3)}, 3),
]


@pytest.mark.parametrize(
    "compress", [(), ("obs", "infos", "actions", "key", "seq_lens", "state_in_0", "absent")]
)
@pytest.mark.parametrize("make", MAKERS)
def test_every_kind_of_batch_comes_back(make: Callable[[], Batch], compress: tuple[str, ...]) -> None:
    batch = make()
    found = there_and_back(batch, compress_columns=compress)
    assert_same(found, batch, "what was read")
    assert list(found.keys()) == list(batch.keys())
    if isinstance(batch, MultiAgentBatch):
        assert found.env_steps() == batch.env_steps()


def test_attributes_come_back_and_padding_is_not_written() -> None:
    """Rules 4.4 and 4.8 of docs/format.md."""
    found = there_and_back(sequences(padded=True))
    assert_same(found, sequences(padded=True).unpad(), "what was read")
    plain = there_and_back(sequences())
    assert isinstance(plain, SampleBatch)
    assert (plain.max_seq_len, plain.num_grad_updates) == (4, 2.5)


def test_policies_without_rows_are_left_out() -> None:
    batch = MultiAgentBatch({"a": steps(2), "b": steps(0)}, 2)
    assert list(there_and_back(batch)) == ["a"]


def test_the_head_says_rows_units_and_schema_without_parsing() -> None:
    """Rules 4.2 and 4.3 of docs/format.md."""
    for batch, rows, units in ((steps(6), 6, 6), (sequences(), 6, 3), (agents(), 6, 4)):
        schema = Schema.of(batch)
        head = parse_head(encode_line(batch, schema)[:200])
        assert head == (schema.hash, rows, units)


def test_only_wanted_columns_are_decoded() -> None:
    schema = Schema.of(steps(3))
    line = encode_line(steps(3), schema)
    found = decode_line(line, lambda _: schema, columns=["t", "obs"])
    assert list(found) == ["obs", "t"]
    with pytest.raises(MissingColumn, match="no column 'nope'"):
        decode_line(line, lambda _: schema, columns=["nope"], uri="here")


def test_a_line_is_readable_as_the_page_says() -> None:
    """The shapes are those of any JSON reader's lists."""
    written = json.loads(encode_line(nested(2), Schema.of(nested(2)), compress_columns=["phase"]))
    assert written["type"] == "SampleBatch"
    assert written["columns"]["obs"]["sensors"][1]["a/b"] == [[1], [1]]
    assert written["columns"]["actions"] == [[0, 1], [[], []]]
    assert written["columns"]["infos"][0]["q"] == {"$tuple": ["x", None, 0]}
    assert set(written["columns"]["phase"]) == {"zstd"}
    assert written["columns"]["key"] == {"width": 3, "base64": "YWIAYwBk"}


def test_a_batch_that_does_not_fit_the_schema_is_refused() -> None:
    schema = Schema.of(steps(3))
    for change in ({"obs": np.zeros((3, 3))}, {"t": np.zeros((3, 1), int)}, {"extra": np.zeros(3)}):
        with pytest.raises(SchemaError):
            encode_line(SampleBatch({**dict(steps(3)), **change}), schema)
    with pytest.raises(SchemaError, match="without columns"):
        encode_line(SampleBatch(), schema)
    batch = steps(3)
    batch.num_grad_updates = float("nan")
    with pytest.raises(SchemaError, match="num_grad_updates"):
        encode_line(batch, schema)


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [lambda: steps(2), agents])
def test_no_flipped_bit_and_no_cut_gives_a_batch(make: Callable[[], Batch]) -> None:
    schema = Schema.of(make())
    line = encode_line(make(), schema, compress_columns=["new_obs"])
    for place in range(len(line)):
        for bit in range(8):
            flipped = bytearray(line)
            flipped[place] ^= 1 << bit
            with pytest.raises(CorruptData, match="CRC-32"):
                decode_line(bytes(flipped), lambda _: schema, uri="u", record=3)
        with pytest.raises(CorruptData) as caught:
            decode_line(line[:place], lambda _: schema, uri="u", record=3)
        assert (caught.value.uri, caught.value.record) == ("u", 3)


def sealed(text: str) -> bytes:
    """A line that a stranger made: its CRC is right."""
    return b'%b,"crc32":"%08x"}' % (text.encode(), zlib.crc32(text.encode()))


def forged(batch: Batch, old: str, new: str) -> tuple[bytes, Schema]:
    schema = Schema.of(batch)
    start = encode_line(batch, schema)[:-20].decode()
    assert old in start
    return sealed(start.replace(old, new, 1)), schema


LIES: list[tuple[Callable[[], Batch], str, str, str | None]] = [
    (lambda: steps(2), '"rows":2', '"rows":3', "obs"),
    (lambda: steps(2), '"rows":2', '"rows":0', "obs"),
    (lambda: steps(2), '"units":2', '"units":1', None),
    (lambda: steps(2), '"rows":2', '"rows":99999999999', None),
    (lambda: steps(2), '"rewards"', '"reward"', "reward"),
    (lambda: steps(2), ',"t":[0,1]', "", "t"),
    (lambda: steps(2), '"t":[0,1]', '"t":[0,1],"t":[0,1]', None),
    (lambda: steps(2), '"t":[0,1]', '"t":[0,1,2]', "t"),
    (lambda: steps(2), '"t":[0,1]', '"t":[0,1e999]', "t"),
    (lambda: steps(2), '"t":[0,1]', '"t":[0,NaN]', None),
    (lambda: steps(2), '"t":[0,1]', '"t":' + "[" * 2000 + "]" * 2000, None),
    (lambda: steps(2), '"t":[0,1]', '"t":"\ud7ff"', "t"),
    (lambda: steps(2), '"columns":{', '"columns":[{', None),
    (lambda: steps(2), "SampleBatch", "MultiAgentBatch", None),
    (lambda: steps(2), "SampleBatch", "Provenance", None),
    (lambda: nested(2), '"sensors":[', '"sensors":[[],', "obs/sensors"),
    (lambda: nested(2), '"image"', '"picture"', "obs"),
    (sequences, '"seq_lens":[3,1,2]', '"seq_lens":[3,1,3]', "seq_lens"),
    (sequences, '"seq_lens":[3,1,2]', '"seq_lens":[4,2]', "state_in_0"),
    (sequences, '"seq_lens":[3,1,2]', '"seq_lens":[7,-2,1]', "seq_lens"),
    (sequences, '"seq_lens":[3,1,2]', '"seq_lens":[]', "seq_lens"),
    (sequences, '"seq_lens":[3,1,2]', '"seq_lens":{"base64":""}', "seq_lens"),
    (sequences, '"max_seq_len":4', '"max_seq_len":2', None),
    (sequences, '"max_seq_len":4', '"max_seq_len":"4"', None),
    (sequences, '"max_seq_len":4', '"time_major":true', None),
    (agents, '"left":{"rows":4', '"left":{"rows":3', None),
    (agents, '"left"', '"nobody"', None),
    (agents, '"rows":6', '"rows":7', None),
    (agents, '"units":4', '"units":5', None),
    (agents, '"env_steps":7', '"env_steps":-7', None),
    (agents, '"left":{"rows":4,', '"left":[],"middle":{"rows":4,', None),
]


@pytest.mark.parametrize(("make", "old", "new", "column"), LIES)
def test_a_line_that_lies_is_corrupt_whatever_its_crc(
    make: Callable[[], Batch], old: str, new: str, column: str | None
) -> None:
    line, schema = forged(make(), old, new)
    with pytest.raises(CorruptData) as caught:
        decode_line(line, lambda _: schema, uri="u", record=3)
    assert (caught.value.uri, caught.value.record) == ("u", 3)
    if column is not None:
        assert caught.value.column == column


@settings(max_examples=80, deadline=None)
@given(
    place=st.floats(0, 1, exclude_max=True),
    new=st.sampled_from(
        ['"', "[", "]", "{", "}", ",", ":", "0", "-", "e9", "null", "true", '{"zstd":""}', "\\"]
    ),
    make=st.sampled_from([lambda: steps(2), lambda: nested(2), sequences, agents]),
)
def test_a_stranger_s_line_is_a_batch_or_corrupt_and_nothing_else(
    place: float, new: str, make: Callable[[], Batch]
) -> None:
    schema = Schema.of(make())
    start = encode_line(make(), schema)[:-20].decode()
    at = int(place * len(start))
    try:
        found = decode_line(sealed(start[:at] + new + start[at + 1 :]), lambda _: schema)
    except CorruptData:
        return
    assert found.agent_steps() == make().agent_steps()


def test_what_would_fill_the_memory_is_unsafe(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = steps(6)
    schema = Schema.of(batch)
    line = encode_line(batch, schema)
    for limits in ({"group_bytes": 100}, {"group_rows": 5}, {"line_bytes": len(line) - 1}):
        with pytest.raises(UnsafeData):
            decode_line(line, lambda _: schema, limits=Limits(**limits))
    decode_line(line, lambda _: schema, limits=Limits(group_bytes=1000, group_rows=6, line_bytes=len(line)))
    monkeypatch.setattr(json_lines, "_MAX_DECODED", 100)
    with pytest.raises(LineTooLarge, match="compress_columns"):
        encode_line(batch, schema)


def test_what_is_too_large_to_be_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = steps(6)
    schema = Schema.of(batch)
    size = len(encode_line(batch, schema))
    for limit in (size - 1, 100):
        monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", limit)
        with pytest.raises(LineTooLarge):
            encode_line(batch, schema)
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", size)
    encode_line(batch, schema)


def test_provenance_is_a_line_of_its_own() -> None:
    line = encode_provenance('{"env":"Pong","seed":3}', Schema.of(steps(1)))
    assert is_provenance(line)
    assert is_intact(line)
    assert parse_head(line) is None
    assert parse_provenance(line) == {"env": "Pong", "seed": 3}
    for damaged in (
        line[:-1],
        line.replace(b"Pong", b"Gong"),
        b"",
        encode_line(steps(1), Schema.of(steps(1))),
    ):
        with pytest.raises(CorruptData):
            parse_provenance(damaged, uri="u")
