"""Columns whose rows consist of parts: lists of texts, and values of Sequence, Graph and Text spaces."""

from __future__ import annotations

import datetime
import io
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from further import further
from gymnasium import spaces
from gymnasium.spaces import GraphInstance
from stored_batches import (
    assert_identical,
    columns_of_parts,
    files,
    fresh_root,
    group_bytes,
    load,
    same_objects,
    store,
)

import rlio
from rlio import SampleBatch
from rlio.batch.arrays import object_column
from rlio.errors import CorruptData, SchemaConflict, SchemaError
from rlio.schemas.column import ColumnSpec
from rlio.schemas.nested import structure_from_arrow, structure_to_arrow
from rlio.schemas.schema import Schema
from rlio.schemas.spaces import space_to_json
from rlio.schemas.structure import Structure, packed, structure_of, structure_of_space

BOX = spaces.Box(0, 9, (2,), np.float32)

#: Spaces whose values have no fixed size.
SPACES: dict[str, gym.Space[Any]] = {
    "texts": spaces.Sequence(spaces.Text(6)),
    "stacked texts": spaces.Sequence(spaces.Text(6), stack=True),
    "tuples of arrays": spaces.Sequence(BOX),
    "arrays": spaces.Sequence(BOX, stack=True),
    "tuples of numbers": spaces.Sequence(spaces.Discrete(5)),
    "tuples of bits": spaces.Sequence(spaces.MultiBinary(3)),
    "tuples of dicts": spaces.Sequence(spaces.Dict(a=BOX, name=spaces.Text(3))),
    "dicts of arrays": spaces.Sequence(spaces.Dict(a=BOX, b=spaces.Discrete(3)), stack=True),
    "tuples of pairs": spaces.Sequence(spaces.Tuple([BOX, spaces.Text(3)])),
    "tuples of tuples": spaces.Sequence(spaces.Sequence(spaces.MultiDiscrete([2, 3]))),
    "tuples of stacks": spaces.Sequence(spaces.Sequence(BOX, stack=True)),
    "tuples of graphs": spaces.Sequence(spaces.Graph(BOX, spaces.Discrete(3))),
    "graphs": spaces.Graph(BOX, spaces.Box(-1, 1, (3,), np.float64)),
    "graphs without edges": spaces.Graph(spaces.Discrete(4), None),
}
if not gym.__version__.startswith("1.2."):  # Its graphs have nodes of Box and Discrete spaces only.
    SPACES["graphs of dicts"] = spaces.Graph(spaces.Dict(a=BOX, b=spaces.Discrete(3)), spaces.Discrete(2))


def sampled(space: gym.Space[Any], rows: int, seed: int = 0) -> np.ndarray:
    """Values of a space, one a row; of a Graph every third has no edges."""
    space.seed(seed)
    if isinstance(space, spaces.Graph):
        return object_column(
            space.sample(num_nodes=1 + n % 4, num_edges=n % 3 if space.edge_space else None)
            for n in range(rows)
        )
    return object_column(space.sample() for _ in range(rows))


def given(space: gym.Space[Any]) -> dict[str, Any]:
    """The spaces of a writer whose observations are of this one."""
    return {"default_policy": (space, spaces.Discrete(2))}


def rows_of(rows: int, first: int = 0, **more: Any) -> SampleBatch:
    return SampleBatch({"t": np.arange(first, first + rows), **columns_of_parts(rows, first), **more})


def kinds(root: str) -> dict[str, str]:
    (schema,) = rlio.open_dataset(root).schemas.values()
    return {name: spec.kind for name, spec in schema.columns.items()}


def table_of(root: str) -> pa.Table:
    (data,) = (data for path, data in files(root).items() if path.endswith(".parquet"))
    return pq.read_table(io.BytesIO(data))


class TestStoredRows:
    @pytest.mark.few(1)
    @pytest.mark.parametrize("writer", [rlio.ParquetWriter, rlio.JsonWriter])
    @pytest.mark.parametrize("limit", [2000, *further(1, 1 << 23)])
    def test_rows_come_back_with_their_types(self, writer: Any, limit: int) -> None:
        root = fresh_root()
        with group_bytes(limit), writer(root, spool=None) as out:
            out.write(rows_of(20))
            out.write(rows_of(13, 20))
        assert_identical(load(root, batch_size=7), rows_of(33))
        assert {*kinds(root).values()} == {"scalar", "nested"}

    @pytest.mark.few(1)
    @pytest.mark.parametrize("cache", ["memory", "disk", "none"])
    def test_stores_draw_them(self, cache: Any, tmp_path: Path) -> None:
        store(rows_of(60), root=str(tmp_path))
        with rlio.DatasetReader(
            tmp_path, cache=cache, shuffle=True, seed=0, epochs=1, batch_size=16
        ) as reader:
            found = rlio.concat_samples(list(reader))
        assert sorted(found["t"].tolist()) == list(range(60))
        assert_identical(found, rows_of(60)[found["t"]])

    @pytest.mark.few(3)
    @pytest.mark.parametrize("name", SPACES)
    @pytest.mark.parametrize("layout", ["rows", "time"])
    @pytest.mark.each_value_once
    def test_rows_that_fill_up_sequences_are_of_their_space(self, name: str, layout: Any) -> None:
        space, root = SPACES[name], fresh_root()
        obs = sampled(space, 7)
        rows = SampleBatch(
            eps_id=np.repeat([0, 1], [4, 3]),
            t=np.arange(7),
            obs=obs,
            day=object_column([datetime.date(2026, 1, 31)] * 7),
            word=object_column(["a"] * 7),
            other=object_column([{"a": 1}] * 7),
        )
        store(rows, root=root, spaces=given(space))
        for padding in ("right", "left") if layout == "time" else ("right",):
            draw = rlio.Sequences(5, padding=padding, layout=layout)
            with rlio.DatasetReader(root, cache="memory", epochs=1, shuffle=False, draw=draw) as reader:
                batch = reader.sample()
            blank = structure_of_space(space_to_json(space)).blank()
            for row in (4, 8, 9) if padding == "right" else (0, 5, 6):
                found = {column: batch[column].reshape(-1)[row] for column in ("obs", "day", "word", "other")}
                assert same_objects(found.pop("obs"), blank)
                assert found == {"day": datetime.date(1970, 1, 1), "word": "", "other": None}

    def test_a_live_ring_overwrites_and_saves_them(self, tmp_path: Path) -> None:
        with rlio.ReplayStore(capacity=50) as ring:
            for first in range(0, 120, 10):
                ring.append(rows_of(10, first))
            ring.save(tmp_path / "saved")
        with rlio.ReplayStore.load(tmp_path / "saved") as again:
            found = again.uniform(batch_size=100, seed=0).sample()
        assert_identical(found, rows_of(120)[found["t"]])

    def test_other_tools_read_lists_and_structs(self) -> None:
        root = store(rows_of(8))
        table = table_of(root)
        assert table["words"].to_pylist() == [list(row) for row in columns_of_parts(8)["words"]]
        assert table.schema.field("words").type.value_type == pa.string()
        assert [each["edges"] for each in table["graphs"].to_pylist()][:3] == [None, [1], [2, 2]]
        exported = rlio.open_dataset(root).to_arrow()
        for name in columns_of_parts(1):
            assert exported[name].to_pylist() == table[name].to_pylist()

    def test_the_log_keeps_them(self, tmp_path: Path) -> None:
        from rlio.schemas.log_frames import LogFrames
        from rlio.schemas.row_groups import pieces_of

        batch = rows_of(9)
        frames = LogFrames(Schema.of(batch))
        pieces = pieces_of(batch, frames.schema, rooms=iter([99]), limit=99)[0]
        again = frames.decode(b"".join(frames.encode(pieces)))[0]
        for name, values in columns_of_parts(9).items():
            assert same_objects(list(again.arrays[name]), list(values))

    def test_a_write_copies_the_rows_of_its_caller(self, tmp_path: Path) -> None:
        batch, words, array = rows_of(6), ["a", "b"], np.zeros(2, np.float32)
        batch["words"][5], batch["sets"][5] = words, (array,)
        with rlio.ParquetWriter(tmp_path, spool=None) as writer:
            writer.write(batch)
            words.append("c")
            array += 1
        found = load(str(tmp_path))
        assert found["words"][5] == ["a", "b"]
        assert found["sets"][5][0].tolist() == [0, 0]

    @pytest.mark.few(4)
    @pytest.mark.parametrize("kind", ["sets", "words", "arrays"])
    @pytest.mark.parametrize("writer", [rlio.ParquetWriter, rlio.JsonWriter])
    def test_rows_that_are_changed_in_place_change_no_others(self, writer: Any, kind: str) -> None:
        def row(t: int) -> Any:
            array = np.full(1 + t % 2, t)
            return {"sets": (array,), "words": [str(t)] * (1 + t % 2), "arrays": array}[kind]

        def change(value: Any) -> None:
            if kind == "words":
                value.append("x")
            else:
                array = value if kind == "arrays" else value[0]
                array += 100

        def check(batch: SampleBatch, t: list[int]) -> None:
            for name, later in (("obs", 0), ("new_obs", 1)):
                for number, value in zip(t, batch[name], strict=True):
                    assert same_objects(value, row(number + later))
                    change(value)

        obs = object_column([row(t) for t in range(13)])
        ids = {"eps_id": np.zeros(12, int), "t": np.arange(12), "actions": np.zeros(12)}
        root = fresh_root()
        with writer(root) as made:
            made.write(SampleBatch(obs=obs[:-1], new_obs=obs[1:], **ids))
        with rlio.read(root, cache="none", epochs=1, batch_size=5) as reader:
            for batch in reader:
                check(batch, batch["t"].tolist())
        data = rlio.open_dataset(root)
        for _ in range(2):
            check(data.take([3, 3, 4]), [3, 3, 4])

    def test_observations_are_stored_once(self) -> None:
        made = columns_of_parts(12)["graphs"]
        batch = SampleBatch(obs=made[:-1], new_obs=made[1:], eps_id=np.zeros(11, int), t=np.arange(11))
        batch["new_obs_valid"] = np.arange(11) != 10
        batch["new_obs"][10] = None
        root = store(batch)
        assert table_of(root)["_new_obs"].null_count == 11
        found = load(root)
        assert same_objects(list(found["new_obs"][:10]), list(made[1:11]))
        assert found["new_obs"][10].nodes.shape == (0, 2)

    @pytest.mark.few(4)
    @pytest.mark.parametrize(
        ("column", "row", "what"),
        [
            ("words", ["a", 3], r"int, expected str in row 1; the column has list\[str\]"),
            ("words", ("a",), r"tuple \('a',\), expected list\[str\] in row 1"),
            ("words", None, r"NoneType, expected list\[str\]"),
            ("words", ["\ud800"], "surrogates not allowed in row 1"),
            ("sets", (np.zeros(3, np.float32),), r"float32 of shape \(3,\), expected float32\[2\]"),
            ("ids", (3,), "int, expected int64"),
            ("graphs", GraphInstance(np.zeros((1, 2), np.float64), None, None), "float64 of shape"),
            ("graphs", GraphInstance(np.zeros((1, 2), np.float32), np.zeros(1, int), None), "expected graph"),
        ],
    )
    def test_a_row_of_another_kind_is_refused_by_its_number(self, column: str, row: Any, what: str) -> None:
        root = fresh_root()
        with rlio.ParquetWriter(root, spool=None) as writer:
            writer.write(rows_of(9))
            wrong = rows_of(3, 9)
            wrong[column][1] = row
            with pytest.raises(SchemaConflict, match=what):
                writer.write(wrong)
            writer.write(rows_of(3, 9))
        assert len(load(root)) == 12

    def test_rows_that_show_no_type_are_json(self) -> None:
        batch = SampleBatch(
            t=np.arange(2),
            empty=object_column([[], []]),
            mixed=object_column([["a"], [1]]),
            numbers=object_column([[1, 2], [3]]),
            dicts=object_column([[{"role": "user"}], []]),
            infos=object_column([{"a": ["x"]}, {}]),
            alone=object_column([GraphInstance(np.zeros((1, 2)), None, None)] * 2),
        )
        root = store(batch)
        assert {kind for name, kind in kinds(root).items() if name != "t"} == {"json"}
        assert_identical(load(root), batch)

    def test_links_of_another_dtype_get_that_of_the_column(self) -> None:
        def graph(dtype: Any) -> GraphInstance:
            return GraphInstance(np.zeros((2, 1)), np.ones(1), np.array([[0, 1]], dtype))

        root = store(
            SampleBatch(g=object_column([graph(np.int32)])), SampleBatch(g=object_column([graph(int)]))
        )
        assert [row.edge_links.dtype for row in load(root)["g"]] == [np.int32, np.int32]

    def test_writers_of_other_kinds_share_a_root(self) -> None:
        root = store(rows_of(4))
        other = SampleBatch(
            {"t": np.arange(4), **{name: object_column([None, 1, {}, []]) for name in columns_of_parts(1)}}
        )
        store(other, root=root)
        with rlio.DatasetReader(root, epochs=1, batch_size=8) as reader:
            found = reader.sample()
        for name, values in columns_of_parts(4).items():
            rows = list(found[name])
            assert all(any(same_objects(row, each) for each in rows) for row in [*values, *other[name]])

    def test_columns_that_a_shard_lacks_are_filled_with_empty_rows(self) -> None:
        root = store(rows_of(3))
        store(SampleBatch(t=np.arange(1)), root=root)
        found = load(root, missing="fill", batch_size=5)
        assert [] in list(found["words"])
        assert () in list(found["places"])

    def test_info_and_filters_know_them(self) -> None:
        root = store(rows_of(12))
        shown = {column.name: column.dtype for column in rlio.open_dataset(root).info().columns}
        assert shown["words"] == "list[str]"
        assert shown["graphs"] == "graph(nodes: float32[n, 2], edges: int64[n], edge_links: int32[n, 2])"
        assert load(root, filter="len(words) > 2")["t"].tolist() == [3, 7, 11]

    def test_ragged_refuses_them_and_says_what_they_are(self) -> None:
        for name, kind in (("words", "list"), ("places", "tuple"), ("graphs", "GraphInstance")):
            with pytest.raises(SchemaError, match=f"rows that are '{kind}', expected"):
                rlio.Ragged.of(load(store(rows_of(4)))[name])

    def test_compaction_keeps_them(self, tmp_path: Path) -> None:
        parts = [rows_of(5, 5 * number) for number in range(4)]
        root = store(*parts, root=str(tmp_path), roll=rlio.Roll(max_rows=5, max_seconds=None))
        assert rlio.maintenance.compact(root, min_shards=2).shards_after == 1
        assert rlio.maintenance.verify(root).ok
        assert_identical(load(root), rows_of(20))

    @pytest.mark.further
    def test_blocks_of_ray_give_the_rows_back(self) -> None:
        from rlio.distributed.ray_data.blocks import block_arrays

        table = rlio.open_dataset(store(rows_of(6))).to_arrow()
        arrays, _, _ = block_arrays(pa.concat_tables([table[:2], table[2:]]), None)
        for name, values in columns_of_parts(6).items():
            assert same_objects(list(arrays[name]), list(values))


class TestSpaces:
    @pytest.mark.few(3)
    @pytest.mark.parametrize("name", SPACES)
    def test_values_of_a_space_are_stored_by_its_structure_and_come_back(self, name: str) -> None:
        space = SPACES[name]
        rows = sampled(space, 30)
        described = space_to_json(space)
        structure = structure_of_space(described)
        assert structure is not None
        assert Structure.from_json(structure.to_json()) == structure
        for row in rows:
            assert same_objects(structure.taken(row), row)
            assert same_objects(structure.unpacked(packed(row)), row)
        again = structure_from_arrow(structure_to_arrow(list(rows), structure), structure)
        assert same_objects(again, list(rows))
        root = fresh_root()
        with rlio.ParquetWriter(root, spool=None, spaces=given(space)) as writer:
            writer.write(SampleBatch(obs=rows, actions=np.zeros(30, int)))
        found = load(root)["obs"]
        assert same_objects(list(found), list(rows))
        assert all(space.contains(row) for row in found)
        assert kinds(root)["obs"] == ("ragged" if name == "arrays" else "nested")

    def test_rows_without_items_have_the_structure_of_their_space(self) -> None:
        space = SPACES["tuples of arrays"]
        root = fresh_root()
        with rlio.ParquetWriter(root, spool=None, spaces=given(space)) as writer:
            writer.write(SampleBatch(obs=object_column([(), ()]), actions=[0, 1]))
            writer.write(SampleBatch(obs=object_column([(np.ones(2, np.float32),)]), actions=[1]))
        assert kinds(root)["obs"] == "nested"
        assert [len(row) for row in load(root)["obs"]] == [0, 0, 1]

    def test_values_that_their_space_does_not_have_are_stored_as_they_are(self) -> None:
        rows = object_column([(np.ones(2), np.ones(2)), ()])
        root = fresh_root()
        with rlio.ParquetWriter(root, spool=None, spaces=given(SPACES["tuples of arrays"])) as w:
            w.write(SampleBatch(obs=rows, actions=[0, 1]))
        assert same_objects(list(load(root)["obs"]), list(rows))


class World(gym.Env[Any, Any]):
    """Observations of a nested space with a graph, a sequence and a text; actions of a sequence."""

    observation_space = spaces.Dict(
        graph=SPACES["graphs"],
        seen=spaces.Tuple([SPACES["tuples of arrays"], SPACES["tuples of dicts"]]),
        goal=spaces.Text(8),
        place=BOX,
    )
    action_space = spaces.Sequence(spaces.Discrete(3))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(3)
        self.action_space.seed(4)
        self.steps = 0
        self.given: list[Any] = [self.observation_space.sample()]
        return self.given[-1], {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        self.steps += 1
        self.given.append(self.observation_space.sample())
        return self.given[-1], 1.0, self.steps == 9, False, {}


class PlainWorld(World):
    """The same, with actions that a random policy draws."""

    action_space = spaces.Discrete(2)


class TestRecorders:
    def test_a_recording_of_an_environment_gives_what_its_spaces_contain(self) -> None:
        root, world = fresh_root(), World()
        taken = []
        with rlio.RecordExperience(world, root) as env:
            env.reset(seed=0)
            for _ in range(9):
                taken.append(env.action_space.sample())
                env.step(taken[-1])
        found = load(root)
        self._check(found, world, root)
        assert kinds(root)["actions"] == "nested"
        assert same_objects(list(found["actions"]), taken)

    def test_a_runner_gives_and_stores_what_its_spaces_contain(self) -> None:
        root, worlds = fresh_root(), []

        def make() -> World:
            worlds.append(PlainWorld())
            return worlds[-1]

        config = rlio.RolloutConfig(rollout_fragment_length=9)
        with rlio.RolloutWorker(make, rlio.RandomPolicy(), rollout=config, seed=0, output=root) as runner:
            batch = runner.sample()
        found = load(root)
        assert same_objects(list(found["obs"]["graph"]), list(batch["obs"]["graph"]))
        self._check(found, worlds[-1], root)

    #: What loops give to `record`, a step at a time. The first is shorter than others.
    GIVEN: tuple[list[Any], ...] = (
        ["a", "bcd", ""],
        [b"a", b"bc\0", b""],
        [["a"], ["b", "cde"], []],
        [("a", "b"), ("c",), ("d", "e")],
    )

    @pytest.mark.few(4)
    @pytest.mark.parametrize("given", GIVEN, ids=["texts", "bytes", "lists", "tuples"])
    @pytest.mark.parametrize("count", [None, 2])
    def test_texts_given_to_record_are_not_cut_to_the_first(
        self, given: list[Any], count: int | None
    ) -> None:
        root = fresh_root()
        env: Any
        if count is None:
            env = rlio.RecordExperience(gym.make("CartPole-v1"), root)
        else:
            env = rlio.RecordVectorExperience(gym.make_vec("CartPole-v1", count), root)
        with env:
            env.reset(seed=0)
            for value in given:
                env.record(said=value if count is None else [value] * count)
                env.step(0 if count is None else np.zeros(count, int))
        found = load(root)
        assert same_objects(list(found[np.argsort(found["env_id"], kind="stable")]["said"][:3]), given)

    def test_texts_of_arrays_given_to_record_are_not_cut_to_the_first(self) -> None:
        root = fresh_root()
        with rlio.RecordVectorExperience(gym.make_vec("CartPole-v1", 2), root) as env:
            env.reset(seed=0)
            for texts in (["a", "b"], ["cd", "efg"]):
                env.record(said=np.array(texts))
                env.step(np.zeros(2, int))
        assert sorted(load(root)["said"]) == ["a", "b", "cd", "efg"]

    @pytest.mark.parametrize("value", ["\ud800", ["a", "\ud800"]])
    def test_a_text_without_utf_8_is_refused_at_its_step(self, value: Any) -> None:
        root = fresh_root()
        with rlio.RecordExperience(gym.make("CartPole-v1"), root) as env:
            env.reset(seed=0)
            env.record(said="a" if isinstance(value, str) else ["a"])
            env.step(0)
            env.record(said=value)
            with pytest.raises(SchemaError, match="surrogate"):
                env.step(0)
        assert len(load(root)) == 1

    def test_a_builder_makes_columns_of_lists(self) -> None:
        builder = rlio.BatchBuilder()
        for n in range(4):
            builder.add_values(words=["a", "b"], tokens=np.arange(n), names=np.array(["x", "y"]))
        batch = builder.build_and_reset()
        assert batch["words"].tolist() == [["a", "b"]] * 4
        root = store(batch)
        stored = kinds(root)
        assert (stored["words"], stored["names"], stored["tokens"]) == ("nested", "nested", "ragged")
        assert_identical(load(root), batch)

    def _check(self, found: SampleBatch, world: World, root: str) -> None:
        obs = found["obs"]
        for row in range(9):
            seen = {
                "goal": str(obs["goal"][row]),
                "graph": obs["graph"][row],
                "place": obs["place"][row],
                "seen": tuple(part[row] for part in obs["seen"]),
            }
            assert world.observation_space.contains(seen)
        stored = {name.partition("/")[2]: kind for name, kind in kinds(root).items() if "obs/" in name}
        assert stored == {
            "goal": "text",
            "graph": "nested",
            "place": "list",
            "seen/0": "nested",
            "seen/1": "nested",
        }


class TestDamage:
    def test_lists_whose_offsets_lie_are_errors(self) -> None:
        words = Structure("list", parts=(("", Structure("text")),))
        items = pa.array(["a", "b", "c"])
        for offsets in ([0, 2, 1], [0, 3, 2], [0, 2, 7], [-1, 1, 2], [0, 1, -(2**31)]):
            buffers = [None, pa.py_buffer(np.array(offsets, np.int32))]
            with pytest.raises((CorruptData, pa.ArrowInvalid)):
                structure_from_arrow(
                    pa.ListArray.from_buffers(pa.list_(pa.string()), 2, buffers, children=[items]), words
                )

    def test_nulls_inside_rows_are_errors(self) -> None:
        words = Structure("list", parts=(("", Structure("text")),))
        with pytest.raises(CorruptData, match="nulls"):
            structure_from_arrow(pa.array([["a", None]]), words)
        graph = structure_of_space(space_to_json(SPACES["graphs"]))
        assert graph is not None
        array = structure_to_arrow(list(sampled(SPACES["graphs"], 3)), graph)
        fields = [array.field(n) for n in range(3)]
        fields[2] = pa.nulls(3, fields[2].type)
        with pytest.raises(CorruptData, match="graph"):
            structure_from_arrow(pa.StructArray.from_arrays(fields, ["nodes", "edges", "edge_links"]), graph)

    @pytest.mark.parametrize(
        "written",
        [
            {},
            {"form": "evil"},
            {"form": "text", "parts": [["", {"form": "text"}]]},
            {"form": "list"},
            {"form": "list", "parts": [["x", {"form": "text"}]]},
            {"form": "dict", "parts": [["a", {"form": "text"}], ["a", {"form": "text"}]]},
            {"form": "array", "dtype": "|O", "shape": []},
            {"form": "array", "dtype": "<f4", "shape": [1 << 60]},
            {"form": "array", "dtype": "<f4", "shape": [-1]},
            {"form": "graph", "parts": [["nodes", {"form": "text"}], ["edges", {"form": "text"}]]},
            {"form": "texts", "dtype": "<U70000000"},
            7,
        ],
    )
    def test_descriptions_that_are_not_legal_are_damage(self, written: Any) -> None:
        spec = {"dtype": "|O", "shape": [], "kind": "nested", "structure": written}
        with pytest.raises(CorruptData):
            ColumnSpec.from_json(spec, column="x")

    def test_a_description_nested_too_deep_is_damage(self) -> None:
        written: Any = {"form": "text"}
        for _ in range(1000):
            written = {"form": "list", "parts": [["", written]]}
        with pytest.raises(CorruptData):
            ColumnSpec.from_json(
                {"dtype": "|O", "shape": [], "kind": "nested", "structure": written}, column="x"
            )

    def test_bytes_of_a_store_that_lie_are_errors(self) -> None:
        structure = structure_of([["a", "bc"], []])
        assert structure is not None
        data = packed(["a", "bc"])
        for forged in (data[:-1], data + b"x", data[:4] + b"\xff\xff\xff\x7f" + data[8:], b"\xff" * 8, b""):
            with pytest.raises(ValueError, match=r"bytes|buffer|codec|count"):
                structure.unpacked(forged)

    def test_values_nested_too_deep_are_json_and_not_a_crash(self) -> None:
        value: Any = ["a"]
        for _ in range(20):
            value = [value]
        root = store(SampleBatch(x=object_column([value])))
        assert kinds(root)["x"] == "json"
        assert load(root)["x"][0] == value
        for _ in range(100_000):
            value = [value]
        with pytest.raises(SchemaError):
            store(SampleBatch(x=object_column([value])))


class TestEarlierVersions:
    """Versions before `ragged` and `nested` stored such rows as JSON."""

    def test_their_shards_are_read_appended_to_and_compacted_beside_new_ones(self, tmp_path: Path) -> None:
        def batch(first: int) -> SampleBatch:
            obs = object_column(np.full(n % 4, n, np.int32) for n in range(first, first + 6))
            ids = np.full(6, first)
            return rows_of(6, first, tokens=obs, obs=obs, new_obs=np.roll(obs, -1), eps_id=ids)

        root, roll = str(tmp_path), rlio.Roll(max_rows=3, max_seconds=None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ColumnSpec, "_of_objects", lambda *_: ColumnSpec("|O", (), "json"))
            store(batch(0), batch(6), root=root, writer_id="w00000-00000000", roll=roll)
        assert {*kinds(root).values()} == {"scalar", "json"}
        store(batch(12), batch(18), root=root, writer_id="w00001-00000000", roll=roll)
        expected = rlio.concat_samples([batch(first) for first in (0, 6, 12, 18)])
        for options in ({"cache": "none"}, {"cache": "memory"}, {"cache": "disk"}, {"batch_size": 5}):
            assert_identical(load(root, **options), expected)
        with rlio.FollowReader(root, idle_timeout=0) as following:
            assert_identical(rlio.concat_samples(list(following)), expected)
        assert rlio.maintenance.compact(root, min_shards=2).shards_after == 2
        assert rlio.maintenance.verify(root).ok
        assert_identical(load(root, batch_size=1000), expected)
        table = rlio.open_dataset(root).to_arrow()
        assert table.num_rows == 24
        rlio.maintenance.compact(root, into=tmp_path / "copy")
        copied = load(str(tmp_path / "copy"))
        del copied["_writer"]
        assert_identical(copied, expected)
