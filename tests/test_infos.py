"""Infos as columns: keys of one type have columns, the rest is left, and infos come back as they were."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from crash_child import fork, wait_for
from followed_rows import replay_of, settle
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_batches import assert_same_bits, files, fresh_root, group_bytes, load, numbered, store

import rlio
from rlio import MultiAgentBatch, Roll, SampleBatch
from rlio.batch.arrays import object_column
from rlio.batch.infos import info_objects, is_typed
from rlio.errors import CorruptData, MissingColumn, PublishError, SchemaConflict, SchemaError
from rlio.log.spool import Spool
from rlio.maintenance.compact import compact
from rlio.schemas.info_columns import InfoForm, InfoKey, ParsedInfos
from rlio.schemas.log_frames import LogFrames
from rlio.schemas.row_groups import pieces_of
from rlio.schemas.schema import Schema
from rlio.writers.recovery import recover

X = np.float64


def rows_of(infos: list[Any], first: int = 0) -> SampleBatch:
    return numbered(len(infos), first, infos=object_column(infos))


def read(root: str, **options: Any) -> np.ndarray:
    """The infos of a root by ``t``, whatever their order."""
    batch = load(root, batch_size=7, **options)
    order = np.argsort(batch["t"], kind="stable")
    return batch["infos"][order]


def columns_of(root: str) -> list[set[str]]:
    """The columns of infos in each shard."""
    names = [pq.read_schema(io.BytesIO(data)).names for _, data in sorted(files(root).items())]
    return [{name for name in found if name.startswith("infos")} for found in names]


def _refuse(*args: Any, **options: Any) -> None:
    raise PublishError("no space left on the disk of the log")


def assert_same(found: Any, expected: list[Any]) -> None:
    assert_same_bits(found, object_column(expected), "infos")


# ---- what an info may be ----

NUMBERS = st.one_of(
    st.floats(),
    st.integers(-(2**70), 2**70),
    st.booleans(),
    st.floats().map(np.float64),
    st.floats(width=32).map(np.float32),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.integers(0, 255).map(np.uint8),
    st.booleans().map(np.bool_),
)
ARRAYS = st.one_of(
    st.lists(st.floats(width=32), min_size=2, max_size=2).map(lambda x: np.array(x, np.float32)),
    st.lists(st.integers(0, 9), max_size=3).map(lambda x: np.array(x, np.int64)),
    st.just(np.arange(6.0).reshape(2, 3)),
    st.just(np.array(2.5)),
    st.just(np.array([1], ">i4")),
)
OTHERS = st.one_of(st.none(), st.text(max_size=3), st.lists(st.integers(0, 3), max_size=2), st.just((1, 2.0)))
KEYS = st.sampled_from(["x", "y", "_x", "e", "", "a/b", "a.b", "ü", "x#older", 3, np.str_("x")])
INFOS = st.dictionaries(
    KEYS,
    st.recursive(
        st.one_of(NUMBERS, ARRAYS, OTHERS),
        lambda inner: st.dictionaries(KEYS, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)
#: Nearly alike, as those of environments are.
ALIKE = st.fixed_dictionaries(
    {"x": st.floats().map(np.float64), "n": st.integers(0, 9)},
    optional={
        "e": st.fixed_dictionaries({"r": st.floats(width=32).map(np.float32)}, optional={"l": NUMBERS})
    },
)
ROWS = st.lists(st.one_of(ALIKE, INFOS, st.none()), min_size=1, max_size=6)


class TestForm:
    @given(st.lists(ROWS, min_size=1, max_size=3))
    @settings(max_examples=40, deadline=None)
    def test_infos_come_back_from_columns_as_they_were(self, batches: list[list[Any]]) -> None:
        form = InfoForm()
        for infos in batches:
            form = form.grown(ParsedInfos.of(infos))
        for infos in batches:
            assert_same(info_objects(form.arranged(ParsedInfos.of(infos))), infos)

    @given(ROWS, ROWS)
    @settings(max_examples=40, deadline=None)
    def test_infos_come_back_from_the_joint_form_of_two_writers(
        self, one: list[Any], other: list[Any]
    ) -> None:
        parsed = [ParsedInfos.of(infos) for infos in (one, other)]
        forms = [InfoForm().grown(each) for each in parsed]
        joint = InfoForm.joint(forms)
        for form, each, infos in zip(forms, parsed, (one, other), strict=True):
            made = joint.conformed(form.arranged(each))
            assert_same(info_objects(made), infos)
            again = InfoForm.of(dict(joint.leaves()))
            assert again == joint

    def test_the_type_of_most_values_is_that_of_the_column(self) -> None:
        form = InfoForm().grown(ParsedInfos.of([{"r": 0}, {"r": 0.5}, {"r": 1.5}]))
        assert form == InfoForm({("r",): InfoKey("<f8", (), True)}, has_rest=True)

    def test_a_key_below_another_value_is_left(self) -> None:
        form = InfoForm().grown(ParsedInfos.of([{"e": 1.0}, {"e": {"r": 2.0}}]))
        assert (list(form.keys), form.has_rest) == ([("e",)], True)

    def test_objects_are_new_and_writable(self) -> None:
        array = np.arange(3.0)
        form = InfoForm().grown(parsed := ParsedInfos.of([{"a": array}, {"a": array}]))
        made = form.arranged(parsed)
        one, other = info_objects(made), info_objects(made)
        one[0]["a"][:] = 7
        one[1]["b"] = 1
        assert_same(other, [{"a": array}, {"a": array}])


class TestShards:
    def test_keys_of_one_type_are_columns_and_nothing_is_left(self) -> None:
        infos = [{"x": X(n), "reward": np.float32(-n), "alive": n > 2, "lives": n} for n in range(20)]
        infos[9]["episode"] = {"r": 3.5, "l": 9, "t": 0.25}
        root = store(rows_of(infos))
        keys = {"x", "reward", "alive", "lives", "episode/r", "episode/l", "episode/t"}
        assert columns_of(root) == [{f"infos/{key}" for key in keys}]
        assert_same(read(root), infos)
        (data,) = files(root).values()
        table = pq.read_table(io.BytesIO(data))
        assert table["infos/x"].to_pylist() == [float(n) for n in range(20)]
        assert table["infos/episode/l"].to_pylist() == [9 if n == 9 else None for n in range(20)]

    def test_empty_infos_have_no_column(self) -> None:
        root = store(rows_of([{}] * 5))
        assert columns_of(root) == [set()]
        assert_same(read(root), [{}] * 5)

    @pytest.mark.few(1)
    @pytest.mark.parametrize(
        "options",
        [
            {"cache": "none"},
            {"cache": "none", "shuffle": True},
            {"cache": "memory", "shuffle": True},
            {"cache": "disk"},
        ],
    )
    @given(batches=st.lists(ROWS, min_size=1, max_size=2), others=ROWS)
    @settings(max_examples=5, deadline=None)
    def test_infos_of_several_writers_come_back(
        self, options: dict[str, Any], batches: list[list[Any]], others: list[Any]
    ) -> None:
        root, every = fresh_root(), [*batches, others]
        starts = np.cumsum([0, *map(len, every)]).tolist()
        made = [rows_of(infos, first) for infos, first in zip(every, starts, strict=False)]
        store(*made[:-1], root=root)
        store(made[-1], root=root)
        assert_same(read(root, seed=0, **options), [info for infos in every for info in infos])

    def test_new_keys_extend_the_schema_four_times_and_are_left_then(self) -> None:
        infos = [{f"k{n}": float(n)} for n in range(8)]
        root = store(*(rows_of([info], n) for n, info in enumerate(infos)))
        assert set().union(*columns_of(root)) == {"infos", *(f"infos/k{n}" for n in range(5))}
        assert_same(read(root), infos)

    def test_keys_that_come_later_begin_no_shard_while_rows_wait_for_their_row_group(self) -> None:
        root = store(*(rows_of(infos, 4 * n) for n, infos in enumerate(LATER)))
        assert len(columns_of(root)) == 1
        assert_same(read(root), [info for infos in LATER for info in infos])
        part = load(root, columns=["t", "infos/e/l"])["infos"]["e"]
        has = ["e" in (info or {}) for infos in LATER for info in infos]
        assert part["_l"].tolist() == has
        assert any(has)
        assert not all(has)

    def test_keys_that_come_after_a_row_group_begin_a_shard(self) -> None:
        with group_bytes(600):
            root = store(rows_of([{}] * 40), rows_of([{"x": X(1)}] * 4, 40))
        assert columns_of(root) == [set(), {"infos/x"}]
        assert_same(read(root), [{}] * 40 + [{"x": X(1)}] * 4)

    def test_keys_whose_row_groups_are_smaller_than_the_rows_that_wait_begin_a_shard(self) -> None:
        infos = [{"x": np.full(64, n)} for n in range(4)]
        with group_bytes(2000):
            root = store(rows_of([{}] * 20), rows_of(infos, 20), rows_of([{}] * 20, 24))
        assert columns_of(root) == [set(), {"infos/x"}]
        assert_same(read(root), [{}] * 20 + infos + [{}] * 20)

    def test_rows_wait_no_longer_because_of_a_new_key(self) -> None:
        """The age of the oldest row ends a shard."""
        with rlio.ParquetWriter(fresh_root(), roll=Roll(max_seconds=600)) as writer:
            writer.write(rows_of([{}] * 4))
            timer = writer._timer._timer
            writer.write(rows_of([{"x": X(1)}] * 4, 4))
            assert writer._timer._timer is timer is not None
            writer.flush()
            writer.write(rows_of([{}] * 4, 8))
            assert writer._timer._timer is not timer

    @pytest.mark.usefixtures("stopped_clock")
    def test_rows_with_a_new_key_that_the_log_refuses_leave_the_shard_as_it_was(self, tmp_path: Path) -> None:
        """Recovery finds no trace of them, and makes the same bytes."""
        roots = [tmp_path / name for name in ("whole", "refused", "crashed")]
        options: dict[str, Any] = {
            "writer_id": "w",
            "roll": Roll(max_seconds=None),
            "spool": Spool(sync="never"),
        }

        def refused(root: Path) -> rlio.ParquetWriter:
            writer = rlio.ParquetWriter(root, **options)
            writer.write(rows_of([{}] * 4))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("rlio.log.log.Log.append", _refuse)
                with pytest.raises(PublishError, match="no space"):
                    writer.write(rows_of([{"x": X(1)}] * 4, 4))
            return writer

        with rlio.ParquetWriter(roots[0], **options) as writer:
            writer.write(rows_of([{}] * 4))
        refused(roots[1]).close()
        assert wait_for(fork(lambda: (refused(roots[2]), os._exit(7)))) == 7
        assert recover(roots[2]).rows == 4
        found = [[path.read_bytes() for path in root.glob("data/w/*.parquet")] for root in roots]
        assert found[0] == found[1] == found[2]

    @pytest.mark.usefixtures("stopped_clock")
    def test_a_shard_of_two_schemas_is_made_again_from_its_log(self, tmp_path: Path) -> None:
        """As it is once the store has been away for a while."""
        writer = rlio.ParquetWriter(tmp_path, roll=Roll(max_seconds=None), writer_id="w")
        made = []
        submit = writer._publisher.submit

        def keep(shard: Any) -> None:
            frames = writer._publisher.log.frames(0, shard.rows)
            made.append((bytes(shard.data), bytes(shard.remake(frames).data)))
            submit(shard)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer._publisher, "submit", keep)
            for number, infos in enumerate(LATER):
                writer.write(rows_of(infos, 4 * number))
            writer.close()
        ((data, again),) = made
        assert data == again

    def test_rows_of_several_row_groups_and_policies_come_back(self) -> None:
        own = {
            "a": [{"x": X(n), "e": {"r": n}} if n % 3 else {"x": X(n)} for n in range(40)],
            "b": [{"x": n} if n % 2 else {} for n in range(40)],
        }
        ids = {"eps_id": np.zeros(40, np.int64)}
        batch = MultiAgentBatch(
            {pid: numbered(40, infos=object_column(infos), **ids) for pid, infos in own.items()}, 40
        )
        with group_bytes(600):
            root = store(batch)
        for options in ({"cache": "none"}, {"cache": "memory"}):
            found = load(root, batch_size=16, **options)
            for pid, infos in own.items():
                assert_same(found[pid]["infos"], infos)

    def test_json_infos_of_earlier_shards_are_read_beside_columns(self, tmp_path: Path) -> None:
        infos = [{"x": X(n), "s": "t"} if n % 2 else {"x": X(n)} for n in range(12)]
        root = fresh_root()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rlio.writers.parquet_encoder.ParquetEncoder.has_info_keys", False)
            store(rows_of(infos[:4]), root=root)
        store(rows_of(infos[4:8], 4), root=root)
        with rlio.JsonWriter(root) as writer:
            writer.write(rows_of(infos[8:], 8))
        for options in ({"cache": "none"}, {"cache": "memory", "shuffle": True, "seed": 0}):
            assert_same(read(root, **options), infos)
            part = load(root, columns=["t", "infos/x"], batch_size=5, **options)
            order = np.argsort(part["t"])
            assert part["infos"]["x"][order].tolist() == [float(n) for n in range(12)]
            assert part["infos"]["_x"].all()

    def test_log_records_give_the_same_columns(self) -> None:
        batch = rows_of([{"x": X(1.5), "e": {"l": 1}}, {"s": "t"}, {}, None])
        schema = Schema.of(batch, info_keys=True)
        ((piece,),) = pieces_of(batch, schema, rooms=iter([100]), limit=100)
        frames = LogFrames(schema)
        (again,) = frames.decode(b"".join(map(bytes, frames.encode([piece]))))
        assert again.arrays.keys() == piece.arrays.keys()
        for name, values in piece.arrays.items():
            assert_same_bits(again.arrays[name], values, name)

    def test_a_value_that_cannot_be_stored_is_refused_by_row_and_path(self) -> None:
        with pytest.raises(SchemaError, match=r"row 1: .*infos/camera/stamp"):
            store(rows_of([{"x": 1.0}, {"x": 2.0, "camera": {"stamp": {1, 2}}}]))

    def test_a_column_named_like_a_key_is_refused(self) -> None:
        with pytest.raises(SchemaError, match="the key 'x' of the column 'infos'"):
            store(numbered(2, infos=object_column([{}, {}]), **{"infos/x": np.zeros(2)}))

    def test_a_nested_column_with_an_empty_name_is_no_typed_form(self) -> None:
        rows = numbered(3, infos={"": np.arange(3.0)})
        assert load(store(rows))["infos"][""].tolist() == [0, 1, 2]

    def test_masks_without_values_are_an_error(self) -> None:
        text = Schema.of(rows_of([{"x": 1.0}]), info_keys=True).text
        with pytest.raises(CorruptData, match="do not fit each other"):
            Schema.from_text(text.replace('"infos",["x"]', '"infos",["y"]'))

    @pytest.mark.parametrize("left", [("a", "b", "c"), ({}, [("y", None)]), (5, []), [1]])
    def test_a_residual_that_does_not_fit_the_keys_of_an_info_is_damage(self, left: Any) -> None:
        rest = object_column([left])
        typed = {"x": np.zeros(1), "_x": np.ones(1, bool), "": {"": rest}}
        with pytest.raises(CorruptData, match="does not fit its residual"):
            info_objects(typed)


class TestBatches:
    def batch(self, rows: int = 10) -> tuple[SampleBatch, list[Any]]:
        infos = [{"x": X(n), "e": {"l": n}} if n % 2 else {"x": X(n)} for n in range(rows)]
        batch = load(store(rows_of(infos)), batch_size=1000)
        assert is_typed(batch._raw("infos"))
        return batch, infos

    def test_objects_are_made_once_when_they_are_asked_for(self) -> None:
        batch, infos = self.batch()
        assert "infos object (10,)" in repr(batch)
        assert is_typed(batch._raw("infos"))
        assert_same(batch["infos"], infos)
        batch["infos"][0]["more"] = 1
        assert batch["infos"] is batch["infos"]
        assert batch["infos"][0] == {"x": 0.0, "more": 1}

    @pytest.mark.few(6)
    @pytest.mark.parametrize(
        "of",
        [
            lambda b: b[2:5], lambda b: b[[2, 3, 4]], lambda b: pickle.loads(pickle.dumps(b))[2:5],
            lambda b: b.copy()[2:5], lambda b: SampleBatch(dict(b))[2:5], lambda b: SampleBatch(b)[2:5],
            lambda b: SampleBatch(b.items())[2:5], lambda b: rlio.concat_samples([b[2:4], b[4:5]]),
            lambda b: rlio.concat_samples([b[2:4], SampleBatch(dict(b[4:5]))]),
            lambda b: b.as_multi_agent()["default_policy"][2:5],
        ],
    )  # fmt: skip
    def test_derived_batches_have_the_same_infos(self, of: Any) -> None:
        batch, infos = self.batch()
        assert_same(of(batch)["infos"], infos[2:5])

    def test_rows_tensors_and_comparisons_have_objects(self) -> None:
        batch, infos = self.batch()
        again, _ = self.batch()
        assert batch.equals(again)
        assert [row["infos"] for row in again.rows()] == infos
        again, _ = self.batch()
        assert_same(again.to_torch()["infos"], infos)

    def test_a_batch_that_was_read_is_written_again(self) -> None:
        batch, infos = self.batch()
        root = store(batch)
        assert_same(read(root), infos)
        batch["infos"][3]["s"] = "changed"
        infos[3]["s"] = "changed"
        assert_same(read(store(batch)), infos)

    def test_padding_has_none(self) -> None:
        infos = [{"x": X(n)} for n in range(3)]
        ids = {"eps_id": np.array([1, 1, 2]), "terminateds": np.array([False, True, True])}
        root = store(numbered(3, infos=object_column(infos), **ids))
        draw = rlio.Sequences(2)
        with rlio.read(root, epochs=1, batch_size=10, cache="memory", shuffle=False, draw=draw) as reader:
            batch = reader.sample()
        assert_same(batch["infos"][: len(infos)], [*infos[:2], infos[2]])
        assert batch["infos"][3:].tolist() == [None]


KEYED = [{"x": X(n), "lives": n, "e": {"r": 0.5}} if n % 2 else {"x": X(n)} for n in range(10)]


class TestParts:
    @pytest.mark.parametrize("cache", ["none", "memory", "disk"])
    def test_a_key_is_an_array_with_a_mask(self, cache: Any) -> None:
        root = store(rows_of(KEYED))
        found = load(root, columns=["infos/x", "infos/lives", "infos/e"], cache=cache)
        assert found["infos"]["x"].dtype == np.float64
        assert found["infos"]["x"].tolist() == [float(n) for n in range(10)]
        assert found["infos"]["_lives"].tolist() == [n % 2 == 1 for n in range(10)]
        assert found["infos"]["lives"][1::2].tolist() == [1, 3, 5, 7, 9]
        assert found["infos"]["e"]["_r"].tolist() == [n % 2 == 1 for n in range(10)]
        assert np.isnan(found["infos"]["e"]["r"][::2]).all()

    @pytest.mark.parametrize("cache", ["none", "memory", "disk"])
    def test_numbers_of_other_types_are_among_the_values(self, cache: Any) -> None:
        root = store(rows_of([{"r": 0.5}, {"r": 0.25}, {"r": 1}, {"r": np.float32(2)}, {"r": "text"}, {}]))
        found = load(root, columns=["infos/r"], cache=cache)["infos"]
        assert found["r"][:4].tolist() == [0.5, 0.25, 1, 2]
        assert found["_r"].tolist() == [True] * 4 + [False] * 2

    @pytest.mark.parametrize("cache", ["none", "memory", "disk"])
    def test_numbers_of_other_types_are_among_the_values_beside_a_filter_of_infos(self, cache: Any) -> None:
        root = store(rows_of([{"r": 0.5, "s": 1}, {"r": 0.25, "s": 0}, {"r": 1, "s": 1}]))
        found = load(root, columns=["infos/r"], filter="infos['s'] > 0", cache=cache)["infos"]
        assert {name: part.tolist() for name, part in found.items()} == {"r": [0.5, 1], "_r": [True, True]}

    @pytest.mark.parametrize("cache", ["none", "memory", "disk"])
    def test_a_number_that_another_key_cannot_hold_is_no_error(self, cache: Any) -> None:
        root = store(rows_of([{"n": 0, "x": 1}, {"n": 1, "x": 2}, {"n": 0.5, "x": 3}]))
        assert load(root, columns=["infos/x"], cache=cache)["infos"]["x"].tolist() == [1, 2, 3]

    def test_a_number_that_the_column_cannot_hold_is_an_error(self) -> None:
        root = store(rows_of([{"n": 0}, {"n": 1}, {"n": 0.5}]))
        with pytest.raises(SchemaError, match="read 'infos' whole"):
            load(root, columns=["infos/n"])

    @pytest.mark.few(3)
    @pytest.mark.parametrize("number", [2**70, np.array(2.5), np.float16(2.5), np.array(2.5, ">f4")])
    def test_numbers_whose_type_no_key_has_are_among_the_values(self, number: Any) -> None:
        found = load(store(rows_of([{"r": 0.5}, {"r": 0.5}, {"r": number}])), columns=["infos/r"])["infos"]
        assert (found["r"].tolist(), found["_r"].tolist()) == ([0.5, 0.5, float(number)], [True] * 3)
        root = store(rows_of([{"n": 0}, {"n": 1}, {"n": number}]))
        with pytest.raises(SchemaError, match="int64 cannot hold: read 'infos' whole"):
            load(root, columns=["infos/n"])

    @pytest.mark.parametrize("number", [2**53 + 1, np.uint64(2**64 - 1), 10**400, np.complex64(1j)])
    def test_numbers_are_not_rounded_to_the_dtype_of_the_column(self, number: Any) -> None:
        root = store(rows_of([{"r": 0.5}, {"r": 0.5}, {"r": number}]))
        with pytest.raises(SchemaError, match="float64 cannot hold: read 'infos' whole"):
            load(root, columns=["infos/r"])

    @pytest.mark.filterwarnings("error")
    def test_nan_in_a_column_of_integers_is_an_error_without_a_warning(self) -> None:
        root = store(rows_of([{"n": 0}, {"n": 1}, {"n": float("nan")}]))
        with pytest.raises(SchemaError, match="read 'infos' whole"):
            load(root, columns=["infos/n"])

    def test_a_key_of_several_types_in_several_writers_is_read_whole(self) -> None:
        root = store(rows_of([{"n": 0}]))
        store(rows_of([{"n": 0.5}], 1), root=root)
        with pytest.raises(SchemaConflict, match="read 'infos' whole"):
            load(root, columns=["infos/n"])
        with pytest.raises(MissingColumn, match="read 'infos' whole"):
            load(root, columns=["infos/n"], cache="disk")
        assert_same(read(root), [{"n": 0}, {"n": 0.5}])

    def test_writers_may_lack_a_key(self) -> None:
        root = store(rows_of([{"n": 0, "m": 1}]))
        store(rows_of([{"m": 2}], 1), root=root)
        for cache in ("none", "memory"):
            found = load(root, columns=["t", "infos/n"], cache=cache)
            has = found["infos"]["_n"][np.argsort(found["t"])]
            assert has.tolist() == [True, False]

    def test_an_unknown_key_is_named(self) -> None:
        root = store(rows_of(KEYED))
        with pytest.raises(MissingColumn, match="infos/z"):
            load(root, columns=["infos/z"])

    @pytest.mark.few(3)
    @pytest.mark.parametrize("cache", ["none", "memory"])
    @pytest.mark.parametrize(
        ("text", "passing"),
        [
            ("infos['x'] > 6", [7, 8, 9]),
            ("infos['lives'] > 6", [7, 9]),
            ("infos['lives'] != 7", [0, 1, 2, 3, 4, 5, 6, 8, 9]),
            ("infos['e']['r'] == 0.5 and t < 4", [1, 3]),
            ("infos['none'] == 1", []),
            ("len(infos) == 1 and t < 5", [0, 2, 4]),
        ],
    )
    @pytest.mark.parametrize("rest", [{}, {"s": "t"}])
    @pytest.mark.each_value_once
    def test_a_filter_names_keys(self, text: str, passing: list[int], cache: Any, rest: Any) -> None:
        infos = [*KEYED, {"x": X(-1), **rest}]
        found = load(store(rows_of(infos)), filter=text, cache=cache)
        assert [t for t in (found["t"].tolist() if len(found) else []) if t < 10] == passing


#: The infos of three batches.
LATER: tuple[list[Any], ...] = (
    [{"x": X(n)} for n in range(4)],
    [{"x": X(n), "e": {"l": n}} for n in range(4)],
    [{"x": "t"}, None, {"x": X(3), "list": [1]}, {"e": {"l": 7}}],
)


def mixed_root(root: Path) -> list[Any]:
    """Make a root of infos as JSON, as columns, and with keys that came later, each in its own shard."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlio.writers.parquet_encoder.ParquetEncoder.has_info_keys", False)
        store(rows_of([{"x": X(0), "s": "t"}], 12), root=str(root))
    with rlio.ParquetWriter(root) as writer:
        for number, infos in enumerate(LATER):
            writer.write(rows_of(infos, 4 * number))
            writer.flush()
    return [*(info for infos in LATER for info in infos), {"x": X(0), "s": "t"}]


class TestErrors:
    @pytest.mark.parametrize("writer", [rlio.ParquetWriter, rlio.JsonWriter])
    def test_a_key_that_is_no_column_is_named_with_where_it_is(self, writer: Any) -> None:
        root = fresh_root()
        with writer(root) as out:
            for key in range(7):
                out.write(rows_of([{f"k{key}": 1.0}] * 2, 2 * key))
        data = rlio.open_dataset(root)
        for ask in (
            lambda: load(root, columns=["infos/k6"]),
            lambda: data.take([0], columns=["infos/k6"]),
            lambda: data.stats(columns=["infos/k6"]),
        ):
            with pytest.raises(MissingColumn, match="in 'infos' alone, to be read whole"):
                ask()
        assert read(root)[-1] == {"k6": 1.0}

    def test_a_key_that_no_info_has_is_not_looked_for_in_them(self) -> None:
        root = fresh_root()
        store(rows_of([{"x": 1.0}] * 2), root=root)
        with pytest.raises(MissingColumn, match="did you mean 'infos/x'") as caught:
            load(root, columns=["infos/xx"])
        assert "alone" not in str(caught.value)

    @pytest.mark.parametrize("writer", [rlio.ParquetWriter, rlio.JsonWriter])
    @pytest.mark.parametrize("is_part_first", [True, False])
    def test_parts_of_infos_beside_whole_ones_are_refused_with_a_way_out(
        self, writer: Any, is_part_first: bool
    ) -> None:
        root, whole = fresh_root(), rows_of([{"x": 1.0, "y": 2.0}] * 2)
        store(whole, root=root)
        batches = [whole, load(root, columns=["t", "infos/x"])]
        first, second = batches[::-1] if is_part_first else batches
        with writer(fresh_root()) as out:
            out.write(SampleBatch(t=first["t"], infos=first["infos"]))
            with pytest.raises(SchemaConflict, match="read 'infos' whole to write them"):
                out.write(SampleBatch(t=second["t"], infos=second["infos"]))

    @pytest.mark.parametrize(
        "keys",
        [
            {"x": np.zeros(3)},
            {"x": np.zeros(3), "_x": np.zeros(3)},
            {"x": np.zeros((3, 2)), "_x": np.zeros((3, 2), bool)},
            {"e": {"r": np.zeros(3)}},
            {"e": {"r": np.zeros(3), "_r": np.ones(3, int)}, "x": np.zeros(3), "_x": np.ones(3, bool)},
        ],
    )
    def test_arrays_of_infos_by_hand_need_masks(self, keys: dict[str, Any]) -> None:
        batch = SampleBatch(t=np.arange(3), infos={**keys, "": {"": np.empty((3, 0), bool)}})
        with pytest.raises(SchemaError, match=r"expected the rows that have the key, as bools of shape"):
            batch["infos"]
        for writer in (rlio.ParquetWriter, rlio.JsonWriter):
            with (
                writer(fresh_root()) as out,
                pytest.raises(SchemaError, match=r"as '_[xr]': expected the rows"),
            ):
                out.write(batch)

    def test_a_slice_shares_the_dicts_that_were_made_before(self) -> None:
        root = fresh_root()
        store(rows_of([{"x": 1.0}] * 4), root=root)
        batch = load(root)
        early = batch[:2]
        made = batch["infos"]
        assert batch[:2]["infos"][0] is made[0]
        assert early["infos"][0] is not made[0]
        assert early["infos"].tolist() == made[:2].tolist()


class TestLibrary:
    """What else reads and writes rows."""

    def test_compaction_keeps_infos(self, tmp_path: Path) -> None:
        infos = mixed_root(root := tmp_path / "root")
        assert rlio.verify(root).ok
        compact(root)
        assert rlio.verify(root).ok
        assert_same(read(str(root)), infos)
        compact(root, into=tmp_path / "other")
        assert_same(read(str(tmp_path / "other")), infos)

    def test_followers_and_their_rings_have_infos(self, tmp_path: Path) -> None:
        infos = mixed_root(root := tmp_path / "root")
        with rlio.FollowReader(root, idle_timeout=0) as reader:
            rows = rlio.concat_samples(list(reader))
        assert_same(rows["infos"], [infos[t] for t in rows["t"].tolist()])
        with replay_of(str(root), capacity=100) as replay:
            settle(replay, len(infos))
            rows = replay.sample()
        assert_same(rows["infos"], [infos[t] for t in rows["t"].tolist()])

    def test_a_follower_meets_keys_that_come_later(self) -> None:
        root, seen = fresh_root(), []
        with rlio.ParquetWriter(root) as writer:
            writer.write(rows_of(LATER[0]))
            writer.flush()
            with rlio.FollowReader(root, idle_timeout=30) as reader:
                seen.append(reader.sample())
                for number in (1, 2):
                    writer.write(rows_of(LATER[number], 4 * number))
                    writer.flush()
                    seen.append(reader.sample())
        assert_same(np.concatenate([rows["infos"] for rows in seen]), [i for each in LATER for i in each])

    def test_rows_by_number_and_tables_have_objects(self, tmp_path: Path) -> None:
        infos = mixed_root(root := tmp_path / "root")
        data = rlio.open_dataset(root)
        for row in (0, 5, 9, 12):
            assert_same(object_column([data[row]["infos"]]), [infos[int(data[row]["t"])]])
        table = data.to_arrow(columns=["t", "infos"])
        texts = dict(zip(table["t"].to_pylist(), table["infos"].to_pylist(), strict=True))
        assert (texts[9], texts[0]) == ("null", '{"x":{"$scalar":"<f8","data":[0.0]}}')

    def test_mixtures_rings_and_prioritised_draws_have_infos(self) -> None:
        infos = [{"x": X(n), "e": {"l": n}} if n % 2 else {"x": X(n)} for n in range(8)]
        root = store(rows_of(infos))
        ring = rlio.ReplayStore(capacity=20)
        ring.append(load(root, batch_size=8))
        samplers = [ring.uniform(batch_size=30, seed=0), ring.prioritised(batch_size=30, seed=0)]
        samplers.append(rlio.read({root: 0.5, store(rows_of(infos)): 0.5}, batch_size=16, seed=0))
        for sampler in samplers:
            with sampler:
                rows = sampler.sample()
            assert_same(rows["infos"], [infos[t] for t in rows["t"].tolist()])

    def test_missing_infos_are_filled_with_none(self) -> None:
        root = store(rows_of([{"x": X(1)}]))
        store(numbered(2, 1), root=root)
        for cache in ("none", "memory"):
            assert_same(read(root, missing="fill", cache=cache), [{"x": X(1)}, None, None])

    def test_a_killed_writer_leaves_columns_in_its_log(self, tmp_path: Path) -> None:
        root = tmp_path / "root"

        def die() -> None:
            writer = rlio.ParquetWriter(root)
            for number, infos in enumerate(LATER):
                writer.write(rows_of(infos, 4 * number))
            os._exit(7)

        assert wait_for(fork(die)) == 7
        (found,) = recover(root).logs
        assert (found.outcome, found.lost_rows) == ("recovered", 0)
        assert_same(read(str(root)), [info for infos in LATER for info in infos])
        names = {name for path in root.glob("data/*/*.parquet") for name in pq.read_schema(path).names}
        assert {"infos/x", "infos/e/l"} <= names


class TestStatistics:
    def test_keys_have_statistics_without_the_rows_that_lack_them(self) -> None:
        data = rlio.open_dataset(store(rows_of(KEYED)))
        stats = data.stats(columns=["infos/x", "infos/lives", "infos/e"])
        assert stats["infos/x"].mean == 4.5
        assert (stats["infos/lives"].min, stats["infos/lives"].max, stats["infos/lives"].mean) == (1, 9, 5)
        assert (stats["infos/e/r"].count, stats["infos/e/r"].mean) == (5, 0.5)
        assert "infos/x" in data.stats()

    def test_numbers_of_other_types_count(self) -> None:
        data = rlio.open_dataset(store(rows_of([{"r": 0.5}, {"r": 0.5}, {"r": 2}, {"r": "text"}])))
        assert data.stats(columns=["infos/r"])["infos/r"].mean == 1.0
        assert "infos/r" not in data.stats()

    def test_info_lists_keys(self) -> None:
        found = {c.name: c for c in rlio.open_dataset(store(rows_of(KEYED))).info().columns}
        assert "infos" not in found
        assert (found["infos/lives"].dtype, found["infos/x"].dtype) == ("int64", "float64")
        left = rlio.open_dataset(store(rows_of([*KEYED, {"s": "t"}]))).info().columns
        assert {"infos", "infos/x"} <= {column.name for column in left}

    def test_info_of_writers_with_unlike_types_lists_both(self) -> None:
        root = store(rows_of([{"n": 0}]))
        store(rows_of([{"n": 0.5}], 1), root=root)
        assert "infos/n" in {column.name for column in rlio.open_dataset(root).info().columns}

    def test_infos_are_not_normalised(self) -> None:
        root = store(rows_of(KEYED))
        with pytest.raises(rlio.errors.OptionError, match="is of infos"):
            load(root, normalise={"infos/x": "mean_std"})
