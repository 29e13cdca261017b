"""RLlib's episode Parquet: what RLlib wrote is read in its alignment, and written for RLlib."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rlio
from rlio.batch.episode import Episode
from rlio.errors import CorruptData, OptionError, RlioError, SchemaError, UnknownLayout, UnsafeData
from rlio.formats.files.allowance import Allowance
from rlio.formats.rllib.episodes import RllibEpisodeSink, RllibEpisodeSource
from rlio.formats.rllib.json import RllibJsonSink
from rlio.formats.rllib.states import pack, space_from_rllib, space_to_rllib, unpack
from rlio.formats.sink import Origin, PreparedEpisode
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.readers.episode_reader import EpisodeReader
from rlio.storage.filesystem import Storage

GOLDEN = Path(__file__).with_name("golden") / "formats/rllib"


def all_rows(path: Path, **options: Any) -> rlio.SampleBatch:
    with rlio.read(path, epochs=1, **options) as reader:
        assert isinstance(reader, EpisodeReader)
        assert reader.format.name == "rllib-episodes"
        return rlio.concat_samples(list(reader))


def golden_items(folder: str) -> list[bytes]:
    return pq.read_table(GOLDEN / folder / "episodes.parquet")["item"].to_pylist()


def store(path: Path, items: list[bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"item": pa.array(items, pa.binary())}), path)
    return path


def changed(item: bytes, **values: Any) -> bytes:
    return pack({**unpack(item, allowance=Allowance()), **values})


def test_a_row_holds_what_its_action_saw_and_caused() -> None:
    rows = all_rows(GOLDEN / "nested")
    t = np.tile(np.arange(4), 2)
    assert rows["eps_id"].tolist() == ["nested-0"] * 4 + ["nested-1"] * 4
    assert rows["t"].tolist() == t.tolist()
    for name, at in (("obs", t), ("new_obs", t + 1)):
        assert rows[name]["at"].dtype == np.float32
        assert rows[name]["at"].tolist() == np.stack([at, -at], 1).tolist()
        counted, flags = rows[name]["both"]
        assert counted.tolist() == at.tolist()
        assert flags.tolist() == [[1, 0, int(n) % 2] for n in at]
    np.testing.assert_array_equal(rows["actions"], (t / 10).astype(np.float32)[:, None])
    assert rows["rewards"].tolist() == (t + 1).tolist()
    assert [info["at"] for info in rows["infos"]] == (t + 1).tolist()
    assert rows["action_logp"].tolist() == (-t).tolist()
    assert rows["truncateds"].tolist() == (t == 3).tolist()
    assert not rows["terminateds"].any()
    assert "new_obs_valid" not in rows


def test_the_first_episode_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions of saved states depend on it. The schema is that of the first episode too."""
    loaded, load = [], RllibEpisodeSource.load
    monkeypatch.setattr(
        RllibEpisodeSource, "load", lambda self, *args: loaded.append(args[0]) or load(self, *args)
    )
    rlio.read(GOLDEN / "cartpole").close()
    assert loaded == [0, 0]


def test_episodes_that_the_recorder_wrote_again_are_read_once_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with rlio.read(GOLDEN / "cartpole", epochs=1) as reader:
        assert isinstance(reader, EpisodeReader)
        assert reader.spaces == (gym.make("CartPole-v1").observation_space, gym.spaces.Discrete(2))
        source: Any = reader.source
        assert len(source.notes) == 1
        assert "2 of 6" in source.notes[0]
        rows = rlio.concat_samples(list(reader))
    assert "2 of 6" in caplog.text
    assert len(set(rows["eps_id"])) == len(source.lengths) == 4
    assert len(rows) == sum(source.lengths)
    assert rows["terminateds"].sum() == 4
    first = all_rows(GOLDEN / "cartpole/cartpoleenv/run-000001-00001")
    np.testing.assert_array_equal(first["obs"], rows["obs"][: len(first)])


def test_chunks_that_follow_each_other_are_one_episode_and_others_keep_their_step(tmp_path: Path) -> None:
    rows = all_rows(GOLDEN / "chunks")
    assert rows["obs"].tolist() == rows["t"].tolist() == rows["actions"].tolist() == list(range(7))
    assert rows["new_obs"].tolist() == list(range(1, 8))
    assert rows["terminateds"].tolist() == [False] * 6 + [True]
    with rlio.read(GOLDEN / "chunks", epochs=1) as reader:
        assert isinstance(reader, EpisodeReader)
        assert list(reader.source.lengths) == [7]
    first, second = golden_items("chunks")
    alone = all_rows(store(tmp_path / "alone.parquet", [second]))
    assert alone["t"].tolist() == alone["obs"].tolist() == [3, 4, 5, 6]
    # In the order of their steps, and only what begins where the other stops.
    reverse = all_rows(store(tmp_path / "reverse.parquet", [second, first]))
    assert reverse["t"].tolist() == list(range(7))
    later = changed(second, t_started=4, t=8)
    with rlio.read(store(tmp_path / "gap.parquet", [first, later]), epochs=1) as reader:
        assert isinstance(reader, EpisodeReader)
        assert list(reader.source.lengths) == [3, 4]


def test_what_disagrees_is_damage(tmp_path: Path) -> None:
    first, second = golden_items("chunks")
    observations = unpack(second, allowance=Allowance())["observations"]
    damaged: Mapping[str, list[bytes]] = {
        "other content": [first, changed(first, is_terminated=True)],
        "after the end": [changed(first, is_terminated=True), second],
        "after a truncation": [changed(first, is_truncated=True), second],
        "long after the end": [changed(first, is_terminated=True), changed(second, t_started=4, t=8)],
        "no ends": [msgpack.packb({k: v for k, v in msgpack.unpackb(first).items() if k != "is_terminated"})],
        "overlap": [first, changed(second, t_started=2, t=6)],
        "lengths": [changed(second, t=8)],
        "lookback": [changed(second, observations={**observations, "lookback": 1})],
        "steps": [changed(second, t=-1)],
        "cut": [second[:-20]],
        "no map": [msgpack.packb([1, 2])],
        "no episode": [msgpack.packb({"id_": "a"})],
        "space": [changed(second, _action_space={"space": "box", "low": "x"})],
    }
    for name, items in damaged.items():
        with pytest.raises(CorruptData) as caught:
            all_rows(store(tmp_path / f"{name}.parquet", items))
        assert caught.value.uri is not None, name
        assert not isinstance(caught.value, UnsafeData), name


class _Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_nothing_in_an_episode_runs_and_no_header_takes_memory(tmp_path: Path) -> None:
    (item,) = golden_items("chunks")[1:]
    mark = tmp_path / "ran"
    array = {b"nd": True, b"type": "|O", b"kind": b"O", b"shape": [1], b"data": pickle.dumps(_Payload(mark))}
    small = Limits(packed_values=20)

    def with_infos(data: Any) -> bytes:
        state = msgpack.unpackb(item, strict_map_key=False)
        state["infos"] = {"data": data, "lookback": 2, "finalized": False, "space": None}
        return msgpack.packb(state)

    for infos, kind in (
        (array, UnsafeData),
        ({**array, b"kind": b""}, UnsafeData),
        ([array] * 7, UnsafeData),
        ({**array, b"type": "<f8", b"kind": b"", b"shape": [1 << 40]}, CorruptData),
        ({**array, b"type": [("a", "<f8")], b"kind": b"V"}, CorruptData),
        (msgpack.ExtType(3, b"x"), UnsafeData),
    ):
        with pytest.raises(kind):
            all_rows(store(tmp_path / "hostile.parquet", [with_infos(infos)]))
    assert not mark.exists()
    with pytest.raises(RlioError):
        all_rows(store(tmp_path / "deep.parquet", [b"\x81\xa1a" * 3000 + b"\x01"]))
    with pytest.raises(RlioError):
        all_rows(store(tmp_path / "long.parquet", [b"\x81\xa3id_\xdd\x7f\xff\xff\xff"]))
    with pytest.raises(CorruptData):
        all_rows(store(tmp_path / "many.parquet", [item]), limits=small)


def test_multi_agent_episodes_and_several_environments_are_refused_by_name(tmp_path: Path) -> None:
    (item, _) = golden_items("chunks")
    multi = msgpack.packb({"id_": "a", "agent_episodes": [], "env_t": 3})
    for number, refused in enumerate((multi, changed(item, multi_agent_episode_id="joint"))):
        with pytest.raises(UnknownLayout, match="multi-agent"):
            all_rows(store(tmp_path / f"{number}.parquet", [refused]))
    for env in ("walker", "hopper"):
        store(tmp_path / f"out/{env}/run-000001-00001/0.parquet", [item])
    with pytest.raises(UnknownLayout, match="hopper"):
        all_rows(tmp_path / "out")
    assert len(all_rows(tmp_path / "out/walker")) == 3
    pq.write_table(pa.table({"item": ["text"]}), tmp_path / "text.parquet")
    with pytest.raises(UnknownLayout):
        all_rows(tmp_path / "text.parquet")


def test_spaces_come_back_from_rllibs_description() -> None:
    spaces = gym.spaces
    space = spaces.Dict(
        box=spaces.Box(-np.inf, np.array([[1.0, 2.0]], np.float32), (1, 2)),
        pixels=spaces.Box(0, 255, (2, 2, 3), np.uint8),
        parts=spaces.Tuple((spaces.Discrete(4, start=-1), spaces.MultiBinary(3), spaces.MultiBinary([2, 2]))),
        digits=spaces.MultiDiscrete([3, 4]),
        text=spaces.Text(7, min_length=2, charset="ab"),
    )
    described = unpack(pack(space_to_rllib(space)), allowance=Allowance())
    assert space_from_rllib(described, limits=DEFAULT_LIMITS) == space
    assert space_from_rllib(None, limits=DEFAULT_LIMITS) is None
    with pytest.raises(UnsafeData):
        space_from_rllib(space_to_rllib(spaces.Box(0, 1, (9999,))), limits=Limits(schema_bytes=1000))
    with pytest.raises(SchemaError):
        space_to_rllib(spaces.Graph(spaces.Box(0, 1), None))


@pytest.mark.parametrize("sink", [RllibEpisodeSink, RllibJsonSink])
def test_a_sink_continues_after_the_episodes_that_are_stored(sink: Any, tmp_path: Path) -> None:
    storage, origin = Storage.open(tmp_path), Origin(uri="memory://nowhere")

    def episode(number: int) -> PreparedEpisode:
        return PreparedEpisode.of(
            Episode(number, observations=[0.0, 1.0], actions=[number], rewards=[1.0], terminated=True)
        )

    first = sink(storage, origin)
    first.write(episode(0))
    first.close()
    interrupted = sink(storage, origin)
    assert interrupted.episodes == 1
    interrupted.write(episode(1))
    interrupted.abort()
    last = sink(storage, origin)
    assert last.episodes == 1
    last.write(episode(2))
    last.close()
    with rlio.read(tmp_path, epochs=1) as reader:
        assert rlio.concat_samples(list(reader))["actions"].tolist() == [0, 2]


@pytest.mark.parametrize("sink", [RllibEpisodeSink, RllibJsonSink])
def test_what_another_version_began_is_not_continued(sink: Any, tmp_path: Path) -> None:
    """Its files do not say how many episodes they have."""
    (tmp_path / f"episodes-000000{sink.ending}").touch()
    with pytest.raises(OptionError, match=r"another version.*choose another folder"):
        sink(Storage.open(tmp_path), Origin(uri="memory://nowhere"))


def test_episodes_are_converted_and_proved(tmp_path: Path) -> None:
    source, target = GOLDEN / "cartpole", tmp_path / "out"
    report = rlio.convert(source, target, to="rllib-episodes", prove=True)
    assert (report.episodes, report.rows, report.proved) == (4, 110, True)
    written, given = all_rows(target), all_rows(source)
    assert set(written) == set(given)
    for name in written:
        np.testing.assert_array_equal(written[name], given[name])
    rlio.convert(source, tmp_path / "own", prove=True)
    rlio.convert(tmp_path / "own", tmp_path / "back", to="rllib-episodes", prove=True)
    with pytest.raises(SchemaError, match="dict"):
        rlio.convert(GOLDEN / "nested", tmp_path / "nested", to="rllib-episodes")


@pytest.mark.parametrize("info", [{"a": {1: 2}}, {"a": [{b"b": 2}]}, {"a": np.longdouble(1.5)}])
def test_infos_that_rllib_could_not_read_again_are_not_written(info: Any, tmp_path: Path) -> None:
    rows = rlio.SampleBatch(
        obs=[[0.0]], new_obs=[[1.0]], actions=[0], rewards=[1.0], eps_id=[5], t=[0], terminateds=[True]
    )
    rows["infos"] = np.array([info], object)
    with rlio.ParquetWriter(tmp_path / "own") as writer:
        writer.write(rows)
    with pytest.raises(SchemaError, match=r"key|longdouble"):
        rlio.convert(tmp_path / "own", tmp_path / "out", to="rllib-episodes")


def test_a_missing_final_observation_is_refused_or_repeated_on_request(tmp_path: Path) -> None:
    rows = rlio.SampleBatch(
        obs=np.arange(3.0), actions=[0, 1, 0], rewards=np.ones(3), eps_id=[5] * 3, t=range(3),
        terminateds=[False, False, True],
    )  # fmt: skip
    with rlio.ParquetWriter(tmp_path / "own") as writer:
        writer.write(rows)
    for form in ("rllib-episodes", "rllib-json"):
        with pytest.raises(SchemaError, match="final"):
            rlio.convert(tmp_path / "own", tmp_path / f"raised-{form}", to=form)
        target = tmp_path / f"repeated-{form}"
        rlio.convert(tmp_path / "own", target, to=form, final_obs="repeat", prove=True)
        with rlio.read(target, epochs=1) as reader:
            found = rlio.concat_samples(list(reader))
        assert found["new_obs"].tolist() == [1, 2, 2]
        assert found["eps_id"].tolist() == ["5" if form == "rllib-episodes" else 5] * 3
        with pytest.raises(OptionError):
            rlio.convert(tmp_path / "own", tmp_path / f"x-{form}", to=form, final_obs="zeros")
