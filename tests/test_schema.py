"""Schemas: names, agreement and limits."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_batches import numbered

from rlio import MultiAgentBatch, ParquetWriter, SampleBatch
from rlio.errors import CorruptData, SchemaConflict, SchemaError
from rlio.schemas.leaves import STORED_NEXT_OBS, rebuild
from rlio.schemas.schema import Schema, canonical_json


@given(st.lists(st.text(st.sampled_from("ab/~@.01"), max_size=4), min_size=1, max_size=6, unique=True))
@settings(max_examples=60, deadline=None)
def test_names_of_columns_and_keys_never_collide(names: list[str]) -> None:
    columns = {name: {key: np.zeros(2) for key in names} for name in names}
    schema = Schema.of(SampleBatch(columns))
    assert len(schema.columns) == len(names) ** 2
    again = Schema.from_text(schema.text)
    assert again == schema
    for column, leaves in again.policies["default_policy"].columns.items():
        assert list(rebuild([(leaf.path, leaf.physical) for leaf in leaves])) == list(columns[column])


def test_a_schema_is_its_text_and_its_hash() -> None:
    schema = Schema.of(numbered(3, infos=[{}] * 3), stored={"actions": "raw"})
    again = Schema.from_text(schema.text.encode())
    assert (again.text, again.hash) == (schema.text, schema.hash)
    assert json.loads(schema.text)["format"] == 0
    assert Schema.of(numbered(9, infos=[{}] * 9), stored={"actions": "raw"}).hash == schema.hash
    assert Schema.of(numbered(3)).hash != schema.hash


def test_a_schema_is_named_by_a_blake2b_of_8_bytes_and_not_by_the_start_of_a_longer_one(
    tmp_path: Path,
) -> None:
    """docs/format.md 2, as another language would implement it."""
    with ParquetWriter(tmp_path) as writer:
        writer.write(numbered(3))
    (file,) = (tmp_path / "_schema").iterdir()
    assert file.stem == hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
    assert file.stem != hashlib.blake2b(file.read_bytes()).hexdigest()[:16]
    text = Path(__file__).parents[1].joinpath("docs/format.md").read_text()
    assert "hashlib.blake2b(text, digest_size=8)" in text
    assert "first 8 bytes of its BLAKE2b" not in text


@pytest.mark.parametrize(("columns", "rows"), [(1, 65536), (1024, 1024), (1 << 20, 1), (3 << 20, 1)])
def test_a_row_group_is_a_power_of_two_of_rows_and_at_most_8_mib(columns: int, rows: int) -> None:
    schema = Schema.of(SampleBatch(x=np.broadcast_to(np.float64(0), (2, columns))))
    assert schema.group_rows == rows
    assert rows == 1 or rows * columns * 8 <= 8 << 20


def test_policies_that_disagree_have_physical_names_of_their_own() -> None:
    ids = {"eps_id": [1, 1], "t": [0, 1]}
    batch = MultiAgentBatch(
        {
            "a": SampleBatch({"obs": np.zeros((2, 3)), **ids}),
            "b": SampleBatch({"obs": np.zeros((2, 4)), **ids}),
            "c": SampleBatch({"obs": np.zeros((2, 3)), **ids}),
        },
        2,
    )
    names = {pid: p.columns["obs"][0].physical for pid, p in Schema.of(batch).policies.items()}
    assert names["a"] == names["c"] != names["b"]
    assert all(len(name) == 12 and name.startswith("obs@") for name in names.values())
    spec = canonical_json(Schema.of(batch).columns[names["b"]].to_json()).encode()
    assert names["b"] == f"obs@{hashlib.blake2b(spec, digest_size=4).hexdigest()}"  # docs/format.md 2.2
    assert Schema.from_text(Schema.of(batch).text) == Schema.of(batch)


def test_a_name_that_looks_like_one_of_those_is_refused() -> None:
    ids = {"eps_id": [1, 1], "t": [0, 1]}
    a, b = (SampleBatch({"obs": np.zeros((2, n)), **ids}) for n in (3, 4))
    taken = Schema.of(MultiAgentBatch({"a": a, "b": b}, 2)).policies["a"].columns["obs"][0].physical
    b[taken] = np.zeros(2)
    with pytest.raises(SchemaError, match="rename"):
        Schema.of(MultiAgentBatch({"a": a, "b": b}, 2))


def test_extending_keeps_the_schema_where_nothing_is_new() -> None:
    first = MultiAgentBatch({"a": numbered(2, eps_id=[1, 1])}, 2)
    schema = Schema.of(first)
    assert schema.extended(first) is schema
    assert schema.extended(MultiAgentBatch({}, 0)) is schema
    more = schema.extended(MultiAgentBatch({"b": numbered(2, eps_id=[1, 1])}, 2))
    assert sorted(more.policies) == ["a", "b"]
    assert sorted(schema.policies) == ["a"]


def test_a_column_of_the_name_and_the_type_of_one_of_those_is_refused() -> None:
    """Its values were stored in place of the other column's."""
    ids = {"eps_id": [1, 1], "t": [0, 1]}
    a, b = (SampleBatch({"obs": np.zeros((2, n)), **ids}) for n in (3, 4))
    taken = Schema.of(MultiAgentBatch({"a": a, "b": b}, 2)).policies["a"].columns["obs"][0].physical
    a[taken] = np.ones((2, 3))
    with pytest.raises(SchemaError):
        Schema.of(MultiAgentBatch({"a": a, "b": b}, 2))


def test_new_obs_has_a_physical_name_of_its_own_and_errors_say_new_obs() -> None:
    seen = {"camera": np.zeros((2, 3)), "speed": (np.zeros(2),)}
    batch = SampleBatch(obs=seen, new_obs=seen)
    schema = Schema.of(batch)
    assert set(schema.columns) == {
        *("obs/camera", "obs/speed/0"),
        *(f"{STORED_NEXT_OBS}/camera", f"{STORED_NEXT_OBS}/speed/0"),
    }
    assert Schema.from_text(schema.text) == schema
    policy = schema.policies["default_policy"]
    assert [leaf.name for leaf in policy.columns["new_obs"]] == ["new_obs/camera", "new_obs/speed/0"]
    other = SampleBatch(obs=seen, new_obs={"camera": np.zeros((2, 4)), "speed": (np.zeros(2),)})
    with pytest.raises(SchemaConflict) as info:
        policy.flatten(other, policy="default_policy")
    assert info.value.column == "new_obs/camera"


@pytest.mark.parametrize(
    "column", ["_next", "_stream", "_batch", "_writer", "_new_obs", "x#older", "x.list.element"]
)
def test_names_of_the_format_are_refused(column: str) -> None:
    with pytest.raises(SchemaError, match="reserved by the format"):
        Schema.of(SampleBatch({column: np.zeros(2)}))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"7", b'{"format": 0}', b'{"format": 1}', b"\xff"])
def test_text_that_is_no_schema_is_refused(text: bytes) -> None:
    with pytest.raises(CorruptData, match=r"\[in u\]"):
        Schema.from_text(text, uri="u")


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_schema_with_any_part_replaced_is_refused_or_a_schema(data: st.DataObject) -> None:
    """Whatever a stranger writes, there is no other error."""
    written = json.loads(Schema.of(numbered(3, infos=[{}] * 3, n={"a": np.zeros(3)})).text)
    node, junk = written, st.sampled_from([None, -1, 2**70, "x", [], {}, [[]], True, 1.5, {"dtype": "<f4"}])
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            node[key] = data.draw(junk)
            break
        node = node[key]
    try:
        schema = Schema.from_text(json.dumps(written))
    except CorruptData:
        return
    assert isinstance(schema.columns, dict)
    assert schema.hash
