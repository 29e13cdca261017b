"""What Minari says of the data sets that rlio writes, and rlio of Minari's: `make test-integrations`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

minari = pytest.importorskip("minari", reason="Minari is not installed: make test-integrations")

import rlio  # noqa: E402
from rlio.batch.episode import Episode  # noqa: E402
from rlio.errors import OptionError, SchemaError  # noqa: E402
from rlio.formats.minari.sink import MinariSink  # noqa: E402
from rlio.formats.minari.source import MinariSource  # noqa: E402
from rlio.formats.place import locate_format  # noqa: E402
from rlio.limits import DEFAULT_LIMITS  # noqa: E402
from rlio.schemas.provenance import Provenance  # noqa: E402
from rlio.storage import Storage  # noqa: E402

GOLDEN = Path(__file__).parents[1] / "golden/formats/minari"
IDS = [
    *("cart/collected-v0", "images/jpeg-arrow-v0", "images/jpeg-v0", "images/raw-v0"),
    *("nested/arrow-v0", "nested/hdf5-v0", "nested/parquet-v0"),
]


@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
@pytest.mark.parametrize("name", IDS)
def test_minari_loads_what_rlio_made_of_its_data_as_the_same_data(
    name: str, data_format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(GOLDEN))
    before = minari.load_dataset(name)
    source = MinariSource(locate_format(GOLDEN / name)[1], limits=DEFAULT_LIMITS)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    sink = MinariSink(Storage.open(tmp_path / name), source.origin, data_format=data_format)
    for number in range(len(source.lengths)):
        sink.write(Episode.from_batch(source.load(number, None), id_=number))
    sink.close()
    source.close()
    after = minari.load_dataset(name)
    assert after.spec.dataset_id == name
    assert after.storage.metadata["data_format"] == data_format
    assert after.observation_space == before.observation_space
    assert after.action_space == before.action_space
    assert after.env_spec == before.env_spec
    assert (after.total_episodes, after.total_steps) == (before.total_episodes, before.total_steps)
    for one, other in zip(before.iterate_episodes(), after.iterate_episodes(), strict=True):
        assert one.id == other.id
        for field in ("observations", "actions", "rewards", "terminations", "truncations"):
            np.testing.assert_equal(getattr(other, field), getattr(one, field), err_msg=field)
    seeds = [
        [about.get("seed") for about in data.storage.get_episode_metadata(range(data.total_episodes))]
        for data in (before, after)
    ]
    assert seeds[0] == seeds[1]
    # Minari goes on with it.
    again = [{**vars(episode)} for episode in after.iterate_episodes()]
    assert len(after.filter_episodes(lambda episode: episode.rewards[0] >= 0).episode_indices) == len(again)


@pytest.mark.parametrize("name", IDS)
def test_rlio_serves_the_arrays_that_minari_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(GOLDEN))
    with rlio.read(name, epochs=1) as reader:
        rows = rlio.concat_samples(list(reader))
    data = minari.load_dataset(name)
    for episode, batch in zip(data.iterate_episodes(), rows.split_by_episode(), strict=True):
        found = Episode.from_batch(batch)
        np.testing.assert_equal(plain(found.observations), plain(episode.observations))
        np.testing.assert_equal(plain(found.actions), plain(episode.actions))
        np.testing.assert_equal(found.rewards, episode.rewards)
        assert (found.terminated, found.truncated) == (episode.terminations[-1], episode.truncations[-1])


def plain(value: Any) -> Any:
    """Texts are a list with Minari, and an array of objects with rlio."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return value.tolist() if isinstance(value, np.ndarray) and value.dtype.hasobject else value


@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
@pytest.mark.parametrize("name", IDS)
def test_minari_finds_the_same_episodes_after_a_data_set_of_rlio(
    name: str, data_format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(GOLDEN))
    before = minari.load_dataset(name)
    rlio.convert(name, tmp_path / "rlio", prove=True)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    rlio.convert(
        tmp_path / "rlio", tmp_path / name, to="minari", options={"data_format": data_format}, prove=True
    )
    after = minari.load_dataset(name)
    assert after.observation_space == before.observation_space
    assert after.action_space == before.action_space
    assert after.env_spec == before.env_spec
    for one, other in zip(before.iterate_episodes(), after.iterate_episodes(), strict=True):
        for field in ("observations", "actions", "rewards", "terminations", "truncations"):
            np.testing.assert_equal(getattr(other, field), getattr(one, field), err_msg=field)


class Nested(gym.Env[Any, Any]):
    """Observations in a Dict; episodes of 3, 4, 5, ... steps, which end in both ways."""

    observation_space = gym.spaces.Dict(
        place=gym.spaces.Box(-9, 99, (2,), np.float64), count=gym.spaces.Discrete(99)
    )
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    episode = 2

    def seen(self) -> dict[str, Any]:
        return {"place": np.array([self.steps, self.episode], np.float64), "count": np.int64(self.steps)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.episode = 0, self.episode + 1
        return self.seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        end = self.steps == self.episode
        return self.seen(), float(action[0]), end and self.episode % 2 == 0, end and self.episode % 2 == 1, {}


def record(env: gym.Env[Any, Any], root: Path, episodes: int = 5) -> rlio.Dataset:
    env.action_space.seed(1)
    with rlio.RecordExperience(env, root) as recorded:
        for number in range(episodes):
            recorded.reset(seed=number)
            done = False
            while not done:
                _, _, terminated, truncated, _ = recorded.step(env.action_space.sample())
                done = terminated or truncated
    return rlio.open_dataset(root)


FIELDS = ("id", "observations", "actions", "rewards", "terminations", "truncations", "infos")


def same(one: Any, other: Any) -> None:
    for field in FIELDS:
        np.testing.assert_equal(getattr(other, field), getattr(one, field), err_msg=field)
    assert other.actions.dtype == one.actions.dtype
    assert other.rewards.dtype == one.rewards.dtype


@pytest.mark.parametrize("name", ["CartPole-v1", "Nested"])
def test_a_view_is_the_data_set_that_a_conversion_writes(name: str, tmp_path: Path) -> None:
    data = record(Nested() if name == "Nested" else gym.make(name), tmp_path / "rlio")
    rlio.convert(tmp_path / "rlio", tmp_path / "minari", to="minari")
    written = minari.MinariDataset(tmp_path / "minari/data")
    view = rlio.bridges.to_minari(data)
    assert view.observation_space == written.observation_space
    assert view.action_space == written.action_space
    assert view.env_spec == written.env_spec
    assert (view.env_spec is None) == (name == "Nested")
    assert (len(view), view.total_steps) == (len(written), written.total_steps) == (5, len(data))
    assert view.spec.total_steps == len(data)
    for one, other in zip(written, view, strict=True):
        same(one, other)
    abouts = [list(each.storage.get_episode_metadata(range(5))) for each in (written, view)]
    np.testing.assert_equal(abouts[1], abouts[0])

    kept = [each.filter_episodes(lambda episode: len(episode) % 2 == 1) for each in (written, view)]
    assert kept[1].episode_indices.tolist() == kept[0].episode_indices.tolist()
    assert kept[1].total_steps == kept[0].total_steps < len(data)
    for each in (written, view):
        each.set_seed(3)
    for one, other in zip(written.sample_episodes(3), view.sample_episodes(3), strict=True):
        same(one, other)
    assert [episode.id for episode in view.iterate_episodes([3, 1])] == [3, 1]
    same(view[2], minari.MinariDataset(view.storage, np.array([4, 2]))[1])


def test_a_view_has_the_fields_that_the_provenance_of_all_writers_has(tmp_path: Path) -> None:
    own = {
        "author": ["A"],
        "author_email": ["a@b.c"],
        "algorithm_name": "SAC",
        "code_permalink": "https://x.y",
    }
    rows = {
        "obs": np.zeros((1, 1), np.float32),
        "new_obs": np.ones((1, 1), np.float32),
        "terminateds": [True],
    }
    for number, description in enumerate(["Runs.", "Other runs."]):
        with rlio.ParquetWriter(
            tmp_path / "a",
            spaces={"default_policy": (gym.spaces.Box(-9, 9), gym.spaces.Discrete(2))},
            provenance=Provenance(extra={**own, "description": description, "lab": "north"}),
        ) as writer:
            writer.write(rlio.SampleBatch(rows, actions=[0], rewards=[1.0], eps_id=[number], t=[0]))
    view = rlio.bridges.to_minari(rlio.open_dataset(tmp_path / "a"))
    found = view.storage.metadata
    assert {name: found.get(name) for name in own} == own
    assert "description" not in found
    assert "lab" not in found


def test_a_view_refuses_what_it_cannot_show_and_all_writes(tmp_path: Path) -> None:
    view = rlio.bridges.to_minari(record(Nested(), tmp_path / "nested", 2))
    writes = [
        lambda: view.update_dataset_from_buffer([]),
        lambda: view.storage.update_metadata({}),
        lambda: view.storage.update_episode_metadata([]),
        lambda: view.storage.update_from_storage(view.storage),
    ]
    for write in writes:
        with pytest.raises(OptionError, match="read-only"):
            write()
    with pytest.raises(ValueError, match="No data found"):  # Minari opens its own folders again.
        minari.split_dataset(view, [1, 1])

    spaces = {"default_policy": (gym.spaces.Box(-9, 9), gym.spaces.Discrete(2))}
    rows = rlio.SampleBatch(
        obs=np.zeros((2, 1), np.float32), actions=[0, 1], rewards=[1.0, 1.0], eps_id=[7, 7], t=[0, 1]
    )
    for name, given in (("none", None), ("unfinished", spaces)):
        with rlio.ParquetWriter(tmp_path / name, spaces=given) as writer:
            writer.write(rows)
    with pytest.raises(SchemaError, match="no stored spaces"):
        rlio.bridges.to_minari(rlio.open_dataset(tmp_path / "none"))
    unfinished = rlio.bridges.to_minari(rlio.open_dataset(tmp_path / "unfinished"))
    assert unfinished.total_steps == 2
    with pytest.raises(SchemaError, match="leave out episode 0"):
        unfinished[0]

    with rlio.ParquetWriter(tmp_path / "several") as writer:
        writer.write(rlio.MultiAgentBatch({"a": rows, "b": rows}, 2))
    with pytest.raises(OptionError, match="policy="):
        rlio.bridges.to_minari(rlio.open_dataset(tmp_path / "several"))
