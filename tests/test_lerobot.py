"""LeRobot data sets. LeRobot wrote the fixtures: tests/golden/formats/lerobot/make.py.

Frame t of episode e holds 100 e + t, and its action and reward 100 e + t + 0.5.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from further import further
from sinks import write_episodes

import rlio
from rlio.batch.episode import Episode
from rlio.batch.picture_codecs import decode_batch
from rlio.errors import CorruptData, MissingExtra, OptionError, SchemaError, UnknownLayout, UnsafeData
from rlio.formats.lerobot.sink import LeRobotSink
from rlio.formats.lerobot.source import LeRobotSource
from rlio.formats.place import locate_format
from rlio.formats.sink import Origin, PreparedEpisode
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.readers.episode_reader import EpisodeReader
from rlio.storage import Storage

GOLDEN = Path(__file__).with_name("golden") / "formats/lerobot"
STEPS = np.array([0, 1, 2, 100, 101, 200, 201, 202, 203])
LAST = [2, 4, 8]


def all_rows(root: Any, **options: Any) -> Any:
    with EpisodeReader(root, epochs=1, **options) as reader:
        return rlio.concat_samples(list(reader))


@pytest.mark.parametrize("name", ["v3.0", "v2.1", "v3.0-image"])
def test_every_value_is_in_the_row_of_its_frame(name: str) -> None:
    with rlio.read(GOLDEN / name, epochs=1) as reader:
        rows: Any = rlio.concat_samples(list(reader))
    valid = np.ones(9, bool)
    valid[LAST] = False
    assert (rows["new_obs_valid"] == valid).all()
    for column, at in (("obs", STEPS), ("new_obs", np.where(valid, STEPS + 1, 0))):
        assert rows[column]["state"].tolist() == np.stack([at, -at], 1).tolist()
        assert rows[column]["grid"].shape == (9, 2, 3)
        assert (rows[column]["grid"] == at[:, None, None]).all()
        if name == "v3.0-image":
            assert rows[column]["images.top"].shape == (9, 64, 80, 3)
            expected = np.where(valid | (column == "obs"), at % 100 * 50, 0)
            assert (rows[column]["images.top"] == expected[:, None, None, None]).all()
    assert rows["actions"].tolist() == (STEPS + 0.5)[:, None].tolist()
    assert rows["rewards"].tolist() == (STEPS + 0.5).tolist()
    assert np.flatnonzero(rows["terminateds"]).tolist() == [2, 8]
    assert np.flatnonzero(rows["truncateds"]).tolist() == [4]  # The one whose next.done is false.
    assert rows["t"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert rows["eps_id"].tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert rows["next.success"].tolist() == (rows["t"] == 1).tolist()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["v2.1", "v3.0", "v3.0-image", "v2.1-video", "v3.0-video"])
def test_parts_of_an_episode_are_the_rows_of_the_whole(name: str) -> None:
    """All pictures of a long episode were decoded at once."""
    if "video" in name:
        pytest.importorskip("av", reason="PyAV is not installed: pip install 'rlio[video]'")
    source = open_source(GOLDEN / name)
    assert max(source.lengths) > 2
    for number, steps in enumerate(source.lengths):
        whole = source.load(number, None)
        for size in (1, 2):
            parts = [
                source.load_part(number, at, min(at + size, steps), None) for at in range(0, steps, size)
            ]
            assert rlio.concat_samples(parts).equals(whole)
    source.close()


def test_chosen_columns_alone_are_read() -> None:
    rows = all_rows(GOLDEN / "v3.0-image", columns=["actions", "next.success"])
    assert set(rows) == {"actions", "next.success"}


@pytest.mark.parametrize("name", ["v3.0-video", "v2.1-video"])
def test_frames_of_videos_are_those_of_their_rows(name: str) -> None:
    pytest.importorskip("av", reason="PyAV is not installed: pip install 'rlio[video]'")
    rows = all_rows(GOLDEN / name)
    found = rows["obs"]["images.top"].astype(int)
    assert found.shape == (9, 64, 80, 3)
    assert np.abs(found - (STEPS % 100 * 50)[:, None, None, None]).max() <= 4
    with pytest.raises(UnsafeData):
        all_rows(GOLDEN / name, limits=Limits(group_bytes=20_000))


def test_videos_are_skipped_if_asked_and_refused_by_name_without_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = all_rows(GOLDEN / "v3.0-video", format_options={"videos": "skip"})
    assert set(rows["obs"]) == {"state", "grid"}
    with pytest.raises(OptionError):
        all_rows(GOLDEN / "v3.0-video", format_options={"videos": "play"})
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtra, match=r"images\.top.*videos.*skip"):
        all_rows(GOLDEN / "v3.0-video")


@pytest.mark.parametrize(
    ("place", "key"),
    [
        ("info", "is_depth_map"),
        *further(("info", "video.is_depth_map"), ("video_info", "video.is_depth_map")),
    ],
)
def test_a_video_of_depth_maps_is_refused_and_skipped(place: str, key: str, tmp_path: Path) -> None:
    """Its codes of distances were decoded as the colours of pictures."""
    pytest.importorskip("av", reason="PyAV is not installed: pip install 'rlio[video]'")
    shutil.copytree(GOLDEN / "v3.0-video", tmp_path / "data")
    path = tmp_path / "data/meta/info.json"
    info = json.loads(path.read_text())
    info["features"]["observation.images.top"].setdefault(place, {})[key] = True
    path.write_text(json.dumps(info))
    with pytest.raises(UnknownLayout, match=r"images\.top.*depth maps.*'videos': 'skip'"):
        all_rows(tmp_path / "data")
    rows = all_rows(tmp_path / "data", format_options={"videos": "skip"})
    assert set(rows["obs"]) == {"state", "grid"}


def change_info(**values: Any) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = root / "meta/info.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def change_table(path: str, column: str, values: list[int]) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        table = pq.read_table(root / path)
        at = table.column_names.index(column)
        pq.write_table(table.set_column(at, column, pa.array(values, pa.int64())), root / path)

    return change


def lengthen(path: Path) -> None:
    """Add a row, of an episode that the metadata does not have."""
    table = pq.read_table(path)
    row = table.slice(8).set_column(table.column_names.index("episode_index"), "episode_index", [[3]])
    pq.write_table(pa.concat_tables([table, row.cast(table.schema)]), path)


EPISODES, DATA = "meta/episodes/chunk-000/file-000.parquet", "data/chunk-000/file-000.parquet"


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (change_info(total_frames=10), CorruptData),
        (change_info(total_episodes=4), CorruptData),
        (change_info(codebase_version="v1.6"), UnknownLayout),
        (change_info(features=[]), CorruptData),
        (change_info(data_path="../x.parquet"), CorruptData),
        (change_info(data_path="data/{chunk_index.__class__}"), CorruptData),
        (change_info(data_path="data/{file_index:0999999999d}"), CorruptData),
        (change_table(EPISODES, "length", [3, 3, 3]), CorruptData),
        (change_table(EPISODES, "dataset_to_index", [3, 5, 8]), CorruptData),
        (change_table(EPISODES, "dataset_from_index", [0, 2, 5]), CorruptData),
        (change_table(EPISODES, "episode_index", [0, 1, 1]), CorruptData),
        (change_table(EPISODES, "data/file_index", [0, 0, 1]), CorruptData),
        (change_table(DATA, "episode_index", [0, 0, 0, 1, 1, 1, 2, 2, 2]), CorruptData),
        (change_table(DATA, "frame_index", [0, 1, 2, 1, 0, 0, 1, 2, 3]), CorruptData),
        (lambda root: pq.write_table(pq.read_table(root / DATA).slice(0, 8), root / DATA), CorruptData),
        (lambda root: lengthen(root / DATA), CorruptData),
        (lambda root: (root / DATA).write_bytes((root / DATA).read_bytes()[:-20]), CorruptData),
        (lambda root: (root / DATA).unlink(), CorruptData),
    ],
)
def test_what_disagrees_with_the_metadata_or_is_damaged_is_refused(
    change: Callable[[Path], Any], error: type[Exception], tmp_path: Path
) -> None:
    shutil.copytree(GOLDEN / "v3.0", tmp_path / "a")
    change(tmp_path / "a")
    with pytest.raises(error) as raised:
        all_rows(tmp_path / "a")
    assert str(tmp_path / "a") in str(raised.value)


def test_row_groups_of_many_episodes_and_several_files_are_read_alike(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "v3.0", tmp_path / "a")
    table = pq.read_table(tmp_path / "a" / DATA)
    pq.write_table(table.slice(0, 5), tmp_path / "a" / DATA)
    pq.write_table(table.slice(5), tmp_path / "a/data/chunk-000/file-001.parquet", row_group_size=3)
    change_table(EPISODES, "data/file_index", [0, 0, 1])(tmp_path / "a")
    before, after = all_rows(GOLDEN / "v3.0"), all_rows(tmp_path / "a")
    for name in before:
        np.testing.assert_equal(after[name], before[name])


def set_features(root: Path, change: Callable[[dict[str, Any]], None], **columns: Any) -> Path:
    """A copy of a fixture with other features, and these columns of its data."""
    shutil.copytree(GOLDEN / "v3.0", root)
    info = json.loads((root / "meta/info.json").read_text())
    change(info["features"])
    (root / "meta/info.json").write_text(json.dumps(info))
    table = pq.read_table(root / DATA)
    for name, values in columns.items():
        table = table.append_column(name.replace("__", "."), pa.array(values))
    pq.write_table(table, root / DATA)
    return root


FLAG = {"dtype": "bool", "shape": [1], "names": None}


def test_only_the_last_frame_ends_an_episode_and_earlier_ones_that_are_done_are_counted(
    tmp_path: Path,
) -> None:
    done = [True, True, True, True, False, False, True, True, True]
    root = set_features(tmp_path / "a", lambda features: None)
    table = pq.read_table(root / DATA)
    at = table.column_names.index("next.done")
    pq.write_table(table.set_column(at, "next.done", pa.array(done)), root / DATA)
    rows = all_rows(root)
    assert np.flatnonzero(rows["terminateds"]).tolist() == [2, 8]
    assert np.flatnonzero(rows["truncateds"]).tolist() == [4]
    report = rlio.convert(root, tmp_path / "b", prove=True)
    assert [f.text for f in report.findings if f.kind == "note"] == [
        "next.done is true in 5 frames before the last one of their episodes (3 episodes): these frames do "
        "not end an episode."
    ]
    assert not [f for f in report.findings if f.kind == "rows_after_end"]


def test_a_data_file_of_no_episode_is_named(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "v3.0", tmp_path / "a")
    shutil.copy(tmp_path / "a" / DATA, tmp_path / "a/data/chunk-000/file-001.parquet")
    source = open_source(tmp_path / "a")
    source.close()
    assert source.notes == ["Data files of no episode are not read: ['data/chunk-000/file-001.parquet']."]


@pytest.mark.parametrize(
    ("name", "terminated", "truncated"),
    [("next.terminated", [4], [2, 8]), ("next.truncated", [2, 8], [4])],
)
def test_one_of_the_two_ends_alone_counts(
    name: str, terminated: list[int], truncated: list[int], tmp_path: Path
) -> None:
    flags = (np.arange(9) == 4).tolist()
    root = set_features(
        tmp_path / "a", lambda features: features.update({name: FLAG}), **{name.replace(".", "__"): flags}
    )
    rows = all_rows(root)
    assert np.flatnonzero(rows["terminateds"]).tolist() == terminated
    assert np.flatnonzero(rows["truncateds"]).tolist() == truncated


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "name", ["obs", "new_obs", "actions", "rewards", "dones", "terminateds", "t", "eps_id", "seq_lens"]
)
def test_a_feature_named_like_a_column_of_rlio_is_refused_by_name(name: str, tmp_path: Path) -> None:
    root = set_features(tmp_path / "a", lambda features: features.update({name: FLAG}), **{name: [False] * 9})
    with pytest.raises(UnknownLayout, match=rf"\['{name}'\]"):
        all_rows(root)


@pytest.mark.parametrize(
    ("changed", "named"),
    [("next.observation.final.state", "observation.grid"), ("next.observation.final.x", "final.x")],
)
def test_parts_of_observations_without_a_final_one_are_named_and_the_reverse(
    changed: str, named: str, tmp_path: Path
) -> None:
    root = set_features(
        tmp_path / "a", lambda features: features.update({changed: features["observation.state"]})
    )
    with pytest.raises(UnknownLayout, match=named):
        all_rows(root)


def test_the_path_is_the_root_or_an_id_in_lerobots_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_LEROBOT_HOME", str(GOLDEN.parent))
    assert len(all_rows("lerobot/v3.0")) == 9
    assert len(all_rows(GOLDEN / "v2.1")) == 9


# ---- writing ----


def open_source(root: Path) -> LeRobotSource:
    return LeRobotSource(locate_format(root)[1], limits=DEFAULT_LIMITS)


def written(root: Path, episodes: list[Episode], origin: Origin | None = None, **options: Any) -> Path:
    return write_episodes("lerobot", root, episodes, origin, **options)


def test_an_absent_episode_names_the_file_of_the_episodes(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "v2.1", tmp_path / "a")
    path = tmp_path / "a/meta/episodes.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(CorruptData, match=r"episode 0 is absent.*meta/episodes\.jsonl"):
        rlio.read(tmp_path / "a")


def test_hidden_files_among_those_of_the_episodes_are_passed_over(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "v3.0", tmp_path / "a")
    folder = tmp_path / "a/meta/episodes"
    (folder / "chunk-000/._file-000.parquet").write_bytes(b"\0\5\x16\7" + bytes(60))
    (folder / ".ipynb_checkpoints").mkdir()
    shutil.copy(folder / "chunk-000/file-000.parquet", folder / ".ipynb_checkpoints/copy.parquet")
    assert len(all_rows(tmp_path / "a")) == len(all_rows(GOLDEN / "v3.0"))


@pytest.mark.parametrize("name", ["v3.0", "v2.1", "v3.0-image"])
def test_bytes_of_a_row_are_those_of_the_shortest_episode(name: str) -> None:
    """Positions of saved states depend on them."""
    source = open_source(GOLDEN / name)
    shortest = min(source.lengths)
    rows = decode_batch(source.load(source.lengths.index(shortest), None))
    source.close()
    assert source.row_bytes == rows.size_bytes() // shortest


def test_pictures_need_pillow_at_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"rlio\[images\]"):
        rlio.read(GOLDEN / "v3.0-image")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["v3.0", "v2.1", "v3.0-image"])
def test_what_is_read_is_written_so_that_it_is_read_again(name: str, tmp_path: Path) -> None:
    source = open_source(GOLDEN / name)
    episodes = [Episode.from_batch(source.load(i, None), id_=i) for i in range(3)]
    written(tmp_path / "a", episodes, source.origin)
    again = open_source(tmp_path / "a")
    assert again.origin.extra == source.origin.extra == {"fps": 10, "tasks": ["count 0", "count 1"]}
    source.close()
    again.close()
    before, after = all_rows(GOLDEN / name), all_rows(tmp_path / "a")
    assert set(before) == set(after)
    for column in before:
        np.testing.assert_equal(after[column], before[column])
    if name != "v3.0-image":
        return
    theirs, ours = (json.loads((r / "meta/stats.json").read_text()) for r in (GOLDEN / name, tmp_path / "a"))
    assert ours.keys() - theirs.keys() == {"next.terminated", "next.truncated"}
    for feature in theirs.keys() - {"next.done"}:  # True for an episode that is truncated, too.
        for statistic in ("min", "max", "mean", "std", "count"):
            if (feature, statistic) == ("observation.images.top", "std"):
                # LeRobot 0.4.4 squares bytes as bytes, and finds less than half.
                expected = np.std(STEPS % 100 * 50 / 255)
                assert np.ravel(ours[feature][statistic]) == pytest.approx([expected] * 3)
                continue
            np.testing.assert_allclose(
                ours[feature][statistic], theirs[feature][statistic], rtol=1e-4, atol=1e-6
            )


def an_episode(steps: int = 3, *, final: bool = True, **options: Any) -> Episode:
    observations = np.arange(1, steps + final + 1, dtype=np.float32)[:, None]
    return Episode(5, observations=observations, actions=np.arange(steps), rewards=np.ones(steps), **options)


def test_ends_and_final_observations_come_back(tmp_path: Path) -> None:
    ends = [{"terminated": True}, {"truncated": True}, {}]
    rows = all_rows(written(tmp_path / "a", [an_episode(**end) for end in ends]))
    assert rows["obs"][:, 0].tolist() == [1, 2, 3] * 3
    assert rows["new_obs"][:, 0].tolist() == [2, 3, 4] * 3
    assert rows["new_obs_valid"].all()
    assert np.flatnonzero(rows["terminateds"]).tolist() == [2]
    assert np.flatnonzero(rows["truncateds"]).tolist() == [5]
    assert rows["rewards"].dtype == np.float64
    assert not {"timestamp", "task_index"}.intersection(rows)
    assert all_rows(tmp_path / "a", columns=["timestamp"])["timestamp"].tolist() == [0, 1, 2] * 3
    rows = all_rows(written(tmp_path / "b", [an_episode(), an_episode(final=False)]))
    assert rows["new_obs_valid"].tolist() == [True, True, True, True, True, False]
    assert rows["new_obs"][:, 0].tolist() == [2, 3, 4, 2, 3, 0]
    features = json.loads((tmp_path / "b/meta/info.json").read_text())["features"]
    assert {name for name in features if name.startswith("next.observation")} == {
        "next.observation.final.state",
        "next.observation.final_known",
    }
    rows = all_rows(written(tmp_path / "c", [an_episode(final=False)] * 2))
    assert rows["new_obs_valid"].tolist() == [True, True, False] * 2


def test_columns_of_other_names_are_kept_and_infos_are_left_out_and_named(tmp_path: Path) -> None:
    infos = np.array([{"a": 1}] * 3, object)
    extra = {"action_logp": np.arange(3.0), "env_seed": np.full(3, 8)}
    with rlio.ParquetWriter(tmp_path / "own", spool=None) as writer:
        writer.write(an_episode(infos=infos, extra_outputs=extra).to_batch())
    report = rlio.convert(tmp_path / "own", tmp_path / "a", to="lerobot")
    assert {f.column for f in report.findings if f.kind == "left_out"} == {"infos"}
    assert all_rows(tmp_path / "a")["env_seed"].tolist() == [8, 8, 8]
    assert all_rows(tmp_path / "a")["action_logp"].tolist() == [0, 1, 2]


def test_columns_that_lerobot_has_not_are_refused(tmp_path: Path) -> None:
    plain = an_episode()
    nested = Episode(
        1, observations={"a": {"b": plain.observations}}, actions=plain.actions, rewards=plain.rewards
    )
    tuples = Episode(1, observations=plain.observations, actions=(plain.actions,), rewards=plain.rewards)
    wider = Episode(
        1, observations=np.zeros((4, 2), np.float32), actions=plain.actions, rewards=plain.rewards
    )
    for episodes in ([nested], [tuples], [plain, wider]):
        with pytest.raises(SchemaError):
            written(tmp_path / "a", episodes)
    for fps in (0, -1, True, "x"):
        with pytest.raises(OptionError):
            written(tmp_path / "a", [], fps=fps)


def test_an_interrupted_sink_leaves_no_data_set_and_another_begins_again(tmp_path: Path) -> None:
    written(tmp_path / "a", [an_episode(), an_episode()])
    sink = LeRobotSink(Storage.open(tmp_path / "a"), Origin(uri="x"))
    assert sink.episodes == 0
    sink.write(PreparedEpisode.of(an_episode()))
    sink.abort()
    assert not (tmp_path / "a/meta/info.json").exists()
    assert len(all_rows(written(tmp_path / "a", [an_episode(4)]))) == 4


def test_files_end_at_their_size_and_each_episode_is_a_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlio.formats.lerobot.sink._FILE_MB", 0)
    written(tmp_path / "a", [an_episode(2), an_episode(3)])
    assert [path.name for path in sorted((tmp_path / "a/data").glob("*/*"))] == [
        "file-000.parquet",
        "file-001.parquet",
    ]
    assert all_rows(tmp_path / "a")["obs"][:, 0].tolist() == [1, 2, 1, 2, 3]
    monkeypatch.undo()
    written(tmp_path / "b", [an_episode(2), an_episode(3)])
    metadata = pq.read_metadata(tmp_path / "b" / DATA)
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [2, 3]
