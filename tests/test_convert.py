"""`rlio.convert`: whole episodes, in order, once, however often it is interrupted; refusals; the proof."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pytest
from crash_child import fork, wait_for
from further import first, further
from servers import Server
from typer.testing import CliRunner

import rlio
from rlio.cli.main import app
from rlio.conversion import convert as module
from rlio.conversion import proof
from rlio.conversion.episodes import EpisodeCutter
from rlio.conversion.report import ImportReport
from rlio.errors import CorruptData, OptionError, PublishError, SchemaError, UnknownName
from rlio.formats.d3rlpy_2 import D3rlpySink, D3rlpySource
from rlio.formats.format import Holds, formats
from rlio.formats.sink import PreparedEpisode
from rlio.schemas.provenance import Provenance
from rlio.storage import Storage

TARGETS = [format.name for format in formats() if format.writer]
ENDINGS = {"d3rlpy": ".h5", "d4rl": ".hdf5", "robomimic": ".hdf5"}
SPACES = (gym.spaces.Box(-1e6, 1e6, (2,), np.float32), gym.spaces.Discrete(3))


def episode(number: int, steps: int, **columns: Any) -> rlio.SampleBatch:
    """One episode whose observations say which episode and step they are of."""
    obs = np.stack([np.full(steps + 1, number), np.arange(steps + 1)], 1).astype(np.float32)
    return rlio.SampleBatch(
        obs=obs[:-1],
        new_obs=obs[1:],
        actions=np.arange(steps) % 3,
        rewards=np.arange(steps) + 0.5,
        terminateds=np.arange(steps) == (steps - 1 if number % 3 else -1),
        truncateds=np.arange(steps) == (-1 if number % 3 else steps - 1),
        eps_id=np.full(steps, number),
        t=np.arange(steps),
        **columns,
    )


def record(root: Path | str, lengths: list[int], **options: Any) -> list[rlio.SampleBatch]:
    made = [episode(number, steps) for number, steps in enumerate(lengths)]
    with rlio.ParquetWriter(root, spool=None, **options) as writer:
        for rows in made:
            writer.write(rows)
    return made


def rows_of(root: Path) -> rlio.SampleBatch:
    with rlio.read(root, epochs=1) as reader:
        return rlio.concat_samples(list(reader))


def test_episodes_arrive_whole_in_order_and_equal_in_a_data_set_and_in_a_file(tmp_path: Path) -> None:
    lengths = [3, 1, 40, 2, 5]
    made = rlio.concat_samples(record(tmp_path / "a", lengths))
    report = rlio.convert(tmp_path / "a", tmp_path / "b", prove=True)
    assert (report.episodes, report.rows, report.written, report.proved) == (5, 51, 51, True)
    assert rows_of(tmp_path / "b").equals(made)
    rlio.convert(tmp_path / "a", tmp_path / "c.h5", to="d3rlpy", prove=True)
    found = rows_of(tmp_path / "c.h5")
    assert found["obs"].tolist() == made["obs"].tolist()
    assert found["actions"][:, 0].tolist() == made["actions"].tolist()
    assert found["terminateds"].tolist() == made["terminateds"].tolist()
    assert found["truncateds"].tolist() == made["truncateds"].tolist()
    assert (~found["new_obs_valid"]).sum() == 5
    report = rlio.convert(tmp_path / "c.h5", tmp_path / "d", prove=True)
    assert [(f.kind, f.count) for f in report.findings] == [("no_final_obs", 5)]


def test_rows_of_environments_that_alternate_are_put_together(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path / "a", spool=None) as writer:
        parts = [episode(number, 6) for number in range(4)]
        parts[3]["truncateds"][-1] = False  # Not finished.
        for start in (0, 2, 4):
            for rows in parts:
                writer.write(rows[start : start + 2])
    rlio.convert(tmp_path / "a", tmp_path / "b", prove=True)
    assert rows_of(tmp_path / "b").equals(rlio.concat_samples(parts))


def test_writers_with_equal_ids_of_episodes_stay_apart(tmp_path: Path) -> None:
    record(tmp_path / "a", [3, 4], provenance=Provenance(env="One-v0", seed=1))
    record(tmp_path / "a", [5], provenance=Provenance(env="Two-v0", seed=2))
    rlio.convert(tmp_path / "a", tmp_path / "b", prove=True)
    found = rlio.open_dataset(tmp_path / "b")
    assert sorted(info.rows for info in found.episode_parts()) == [3, 4, 5]
    envs = [found.open_shard(segment).provenance["env"] for segment in found.segments]
    assert set(envs) == {"One-v0", "Two-v0"}


KILLED = """
import os, signal
import rlio
from rlio.conversion import convert as module
from rlio.conversion import proof
module._SHARD_BYTES = 3000
import rlio.formats.episode_files
rlio.formats.episode_files._FILE_BYTES = 3000
left = after
def killed(*_):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
if hook == "put":
    from rlio.storage.local import LocalFolder
    original = LocalFolder.put
    def put(self, path, data):
        killed()
        original(self, path, data)
        killed()
    LocalFolder.put = put
options = {"progress": killed} if hook == "progress" else {}
rlio.convert(src, dst, to=None if to == "rlio" else to, **options)
"""


def killed_after(src: Path, dst: Path, to: str, after: int, hook: str) -> bool:
    """Run a conversion that is killed at some point; whether it was."""
    given = {"src": str(src), "dst": str(dst), "to": to, "after": after, "hook": hook}
    code = wait_for(fork(exec, KILLED, given))
    assert code in (0, -9)
    return code == -9


@pytest.mark.further
@pytest.mark.parametrize(
    "places",
    [
        [(5, "put"), (22, "progress")],
        *further([(0, "put"), (5, "put"), (22, "progress"), (8, "put")]),
    ],
    ids=len,
)
def test_a_conversion_that_is_killed_goes_on_without_losing_or_repeating_rows(
    tmp_path: Path, places: list[tuple[int, str]]
) -> None:
    made = record(tmp_path / "a", [20 + number % 7 for number in range(40)])
    kills = 0
    for after, hook in places:
        kills += killed_after(tmp_path / "a", tmp_path / "b", "rlio", after, hook)
    assert kills == len(places)
    stored = len(rlio.open_dataset(tmp_path / "b"))
    assert 0 < stored < sum(map(len, made))
    report = rlio.convert(tmp_path / "a", tmp_path / "b", prove=True)
    assert report.written == sum(map(len, made)) - stored
    assert rows_of(tmp_path / "b").equals(rlio.concat_samples(made))
    assert rlio.verify(tmp_path / "b").ok
    again = rlio.convert(tmp_path / "a", tmp_path / "b")
    assert (again.rows, again.written) == (report.rows, 0)


@pytest.mark.parametrize("to", first(1, dict.fromkeys(["lerobot", "npz", *TARGETS])))
def test_a_conversion_into_any_format_that_is_killed_loses_and_repeats_no_row(
    to: str, tmp_path: Path
) -> None:
    made = record(tmp_path / "a", [20 + number % 7 for number in range(40)])
    target = tmp_path / f"b{ENDINGS.get(to, '')}"
    # One file of HDF5 is stored at once; Minari's description comes after it.
    last = (33, "progress") if to in ENDINGS else (0 if to == "minari" else 2, "put")
    places = [(17, "progress"), last]
    assert all(killed_after(tmp_path / "a", target, to, *place) for place in places)
    report = rlio.convert(tmp_path / "a", target, to=to, prove=True)
    assert (report.rows, report.proved) == (sum(map(len, made)), True)
    assert report.written < report.rows or to not in ("npz", "parquet", "rllib-json", "rllib-episodes")
    found = rows_of(target)
    assert found["obs"].tolist() == rlio.concat_samples(made)["obs"].tolist()
    left = {path.name for path in tmp_path.rglob("*") if not path.is_relative_to(tmp_path / "a")}
    assert not {"_tmp", "_rlio_convert.json"} & left


def source_of(path: Path, rewards: float) -> None:
    """A file of ten episodes, always of the same size and time."""
    steps = 60
    np.savez(
        path,
        obs=np.zeros((steps, 2), np.float32),
        actions=np.zeros(steps, np.int64),
        rewards=np.full(steps, rewards, np.float32),
        lengths=np.full(10, 6),
    )
    os.utime(path, (1e9, 1e9))


@pytest.mark.parametrize("small", [1 << 20, 0], ids=["by content", "by time"])
def test_a_source_that_was_corrected_is_not_taken_for_the_one_that_was_converted(
    small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlio.source.files._SMALL_BYTES", small)
    source_of(tmp_path / "a.npz", 1.0)
    rlio.convert(tmp_path / "a.npz", tmp_path / "b")
    assert rlio.convert(tmp_path / "a.npz", tmp_path / "b").written == 0
    source_of(tmp_path / "a.npz", 2.0)
    with pytest.raises(OptionError, match=r"changed.*remove this folder"):
        rlio.convert(tmp_path / "a.npz", tmp_path / "b")
    assert set(rows_of(tmp_path / "b")["rewards"]) == {1.0}


def test_a_data_set_that_was_written_again_under_its_writers_id_is_another_source(tmp_path: Path) -> None:
    for rewards in (1.0, 2.0):
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        rows = episode(0, 5)
        rows["rewards"][:] = rewards
        with rlio.ParquetWriter(tmp_path / "a", spool=None, writer_id="w0") as writer:
            writer.write(rows)
        if rewards == 1.0:
            rlio.convert(tmp_path / "a", tmp_path / "b")
    with pytest.raises(OptionError, match="changed"):
        rlio.convert(tmp_path / "a", tmp_path / "b")


@pytest.mark.few(1)
@pytest.mark.parametrize("to", first(2, dict.fromkeys(["npz", "parquet", *TARGETS])))
def test_an_interrupted_conversion_of_a_corrected_source_never_mixes_both_versions(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlio.formats.episode_files._FILE_BYTES", 1)
    target = tmp_path / f"b{ENDINGS.get(to, '')}"
    options: dict[str, Any] = {"to": to, "final_obs": "repeat"}

    def stop(_: int, episodes: int) -> None:
        if episodes == 5:
            raise KeyboardInterrupt

    source_of(tmp_path / "a.npz", 1.0)
    with pytest.raises(KeyboardInterrupt):
        rlio.convert(tmp_path / "a.npz", target, progress=stop, **options)
    source_of(tmp_path / "a.npz", 2.0)
    if target.is_dir() and any(target.iterdir()):
        with pytest.raises(OptionError, match=r"changed.*remove this folder"):
            rlio.convert(tmp_path / "a.npz", target, **options)
        shutil.rmtree(target)
    rlio.convert(tmp_path / "a.npz", target, prove=True, **options)
    assert set(rows_of(target)["rewards"]) == {2.0}


def test_a_corrected_description_beside_the_rows_makes_another_source(tmp_path: Path) -> None:
    record(tmp_path / "own", [3, 4])
    rlio.convert(tmp_path / "own", tmp_path / "a", to="lerobot")
    rlio.convert(tmp_path / "a", tmp_path / "b")
    info = tmp_path / "a/meta/info.json"
    info.write_text(info.read_text().replace('"fps": 1', '"fps": 2'))
    with pytest.raises(OptionError, match="changed"):
        rlio.convert(tmp_path / "a", tmp_path / "b")


def test_a_source_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "own", [3, 4])
    rlio.convert(tmp_path / "own", tmp_path / "a.h5", to="d3rlpy")
    opened: list[str] = []
    original = D3rlpySource.__init__

    def count(self: D3rlpySource, place: Any, **options: Any) -> None:
        opened.append(place.uri)
        original(self, place, **options)

    monkeypatch.setattr(D3rlpySource, "__init__", count)
    rlio.convert(tmp_path / "a.h5", tmp_path / "b", prove=True)
    assert opened == [str(tmp_path / "a.h5")]


@pytest.mark.few(1)
@pytest.mark.parametrize(("to", "name"), [(None, "b"), ("d3rlpy", "b.h5"), ("npz", "b"), ("parquet", "b")])
def test_other_filesystems_are_sources_and_targets(to: str | None, name: str, tmp_path: Path) -> None:
    made = record(f"memory://convert-{to}/a", [3, 4])
    dst = f"memory://convert-{to}/{name}"
    rlio.convert(f"memory://convert-{to}/a", dst, to=to, prove=True)
    rlio.convert(dst, tmp_path / "back", prove=True)
    assert rows_of(tmp_path / "back")["obs"].tolist() == rlio.concat_samples(made)["obs"].tolist()


@pytest.mark.xdist_group("sftp")
@pytest.mark.further
def test_a_file_on_a_server_has_its_name_once_it_is_whole(
    serve: Callable[[str], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve("sftp")
    root, options = server.fresh_root(), server.options
    record(tmp_path / "a", [3, 4])
    listed: list[Any] = []
    storage = Storage.open(root, storage_options=options)
    original = type(storage.fs).mv

    def move(fs: Any, partial: str, final: str) -> None:
        listed.append(fs.ls(final.rpartition("/")[0], detail=False))
        original(fs, partial, final)

    monkeypatch.setattr(type(storage.fs), "mv", move)
    rlio.convert(tmp_path / "a", f"{root}/b.h5", to="d3rlpy", into_storage_options=options, prove=True)
    ((partial,),) = listed
    assert partial.endswith("/.b.h5.partial")
    assert [name for name, _ in storage.children()] == ["b.h5"]


@pytest.mark.further
def test_a_file_that_was_being_written_is_written_again(tmp_path: Path) -> None:
    record(tmp_path / "a", [4] * 10)
    assert killed_after(tmp_path / "a", tmp_path / "b.h5", "d3rlpy", 5, "progress")
    assert not (tmp_path / "b.h5").exists()
    rlio.convert(tmp_path / "a", tmp_path / "b.h5", to="d3rlpy", prove=True)
    assert [path.name for path in tmp_path.glob("*b.h5*")] == ["b.h5"]


def test_a_place_that_holds_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    record(tmp_path / "a", [3])
    record(tmp_path / "other", [4])
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    (tmp_path / "there.h5").write_text("mine")
    for dst, to in (("other", None), ("full", None), ("there.h5", "d3rlpy"), ("a", None)):
        with pytest.raises(OptionError):
            rlio.convert(tmp_path / "a", tmp_path / dst, to=to)
    assert (tmp_path / "there.h5").read_text() == "mine"
    assert len(rlio.open_dataset(tmp_path / "other")) == 4
    with pytest.raises(UnknownName):
        rlio.convert(tmp_path / "a", tmp_path / "b", to="nothing")
    with pytest.raises(OptionError):
        rlio.convert(tmp_path / "a", tmp_path / "b.h5", to="d3rlpy", options={"level": 9})
    with pytest.raises(OptionError):
        rlio.convert({"a": 1.0}, tmp_path / "b")  # type: ignore[arg-type]


@pytest.mark.few(2)
@pytest.mark.parametrize("to", [None, "npz", "minari", "d3rlpy"])
def test_a_second_conversion_into_the_same_place_is_refused_while_the_first_one_runs(
    to: str | None, tmp_path: Path
) -> None:
    record(tmp_path / "a", [3, 30, 4])
    dst = tmp_path / ("b.h5" if to == "d3rlpy" else "b")
    refused = []

    def again(rows: int, episodes: int) -> None:
        if episodes == 2 and not refused:  # Not again, of the proof.
            with pytest.raises((OptionError, PublishError), match="another conversion") as caught:
                rlio.convert(tmp_path / "a", dst, to=to)
            refused.append(caught.value)

    rlio.convert(tmp_path / "a", dst, to=to, progress=again, prove=True)
    assert len(refused) == 1
    assert "b" in str(refused[0].uri)
    if to is None:
        assert rlio.convert(tmp_path / "a", dst).written == 0  # The lock has ended.


def test_spaces_environment_and_report_are_in_the_provenance(tmp_path: Path) -> None:
    about = Provenance(env="Count-v0", seed=7, policy="random", extra={"lab": "north"})
    record(tmp_path / "a", [3, 30], spaces={"default_policy": SPACES}, provenance=about)
    report = rlio.convert(tmp_path / "a", tmp_path / "b")
    found = rlio.open_dataset(tmp_path / "b")
    assert found.spaces == SPACES
    stored = found.open_shard(found.segments[-1]).provenance
    assert (stored["env"], stored["seed"], stored["policy"]) == ("Count-v0", 7, "random")
    assert stored["extra"]["lab"] == "north"
    assert stored["extra"]["converted"]["source"] == str(tmp_path / "a")
    assert stored["extra"]["import_report"] == json.loads(json.dumps(report.to_json()))


class Broken(D3rlpySink):
    """Swaps two rewards of the third episode."""

    def write(self, episode: PreparedEpisode) -> None:
        rewards = np.array(episode.rewards)
        if self.episodes == 2:
            rewards[:2] = rewards[1::-1]
        super().write(replace(episode, rewards=rewards))


class Forgetful(D3rlpySink):
    """Leaves out an episode."""

    def write(self, episode: PreparedEpisode) -> None:
        if len(episode) != 5:
            super().write(episode)


@pytest.mark.few(1)
@pytest.mark.parametrize(("sink", "column"), [(Broken, "rewards"), (Forgetful, "obs")])
def test_the_proof_fails_for_a_broken_sink_and_names_episode_and_column(
    sink: type, column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "a", [3, 4, 5, 6])
    load = module.load
    monkeypatch.setattr(module, "load", lambda place: sink if place.endswith("D3rlpySink") else load(place))
    with pytest.raises(CorruptData) as caught:
        rlio.convert(tmp_path / "a", tmp_path / "b.h5", to="d3rlpy", prove=True)
    assert (caught.value.record, caught.value.column) == (2, column)
    ran = CliRunner().invoke(
        app, ["convert", str(tmp_path / "a"), str(tmp_path / "c.h5"), "--to", "d3rlpy", "--prove", "--json"]
    )
    assert ran.exit_code == 1
    assert json.loads(ran.stdout)["error"]["column"] == column


def test_several_agents_go_into_a_data_set_and_one_policy_into_a_file(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path / "a", spool=None) as writer:
        for number in range(3):
            parts = {pid: episode(number, 4, agent_index=np.full(4, k)) for k, pid in enumerate("xy")}
            writer.write(rlio.MultiAgentBatch(parts, 4))
    report = rlio.convert(tmp_path / "a", tmp_path / "b", prove=True)
    assert (report.episodes, report.rows) == (0, 24)
    assert sorted(rlio.open_dataset(tmp_path / "b").columns) == ["x", "y"]
    with pytest.raises(OptionError):
        rlio.convert(tmp_path / "a", tmp_path / "c.h5", to="d3rlpy")
    with pytest.raises(OptionError):
        rlio.convert(tmp_path / "a", tmp_path / "c.h5", to="d3rlpy", policy="z")
    rlio.convert(tmp_path / "a", tmp_path / "c.h5", to="d3rlpy", policy="y", prove=True)
    assert len(rows_of(tmp_path / "c.h5")) == 12


def test_an_episode_that_is_no_trajectory_is_refused_or_left_out_and_counted(tmp_path: Path) -> None:
    made = [episode(number, 4) for number in range(3)]
    made[1]["new_obs"] = made[1]["new_obs"][[1, 0, 2, 3]]
    with rlio.ParquetWriter(tmp_path / "a", spool=None) as writer:
        for rows in made:
            writer.write(rows)
    rlio.convert(tmp_path / "a", tmp_path / "b", prove=True)
    with pytest.raises(SchemaError):
        rlio.convert(tmp_path / "a", tmp_path / "c.h5", to="d3rlpy")
    report = rlio.convert(tmp_path / "a", tmp_path / "c.h5", to="d3rlpy", on_error="skip", prove=True)
    assert {f.kind: f.count for f in report.findings} == {
        "unlike_new_obs": 2,
        "refused": 1,
        "final_obs_lost": 2,
    }
    assert len(rows_of(tmp_path / "c.h5")) == 8


def test_a_conversion_that_continues_after_a_refused_episode_repeats_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [episode(number, 4, new_obs_valid=np.ones(4, np.bool_)) for number in range(5)]
    made[1]["new_obs_valid"][-1] = False  # RLlib needs it.
    parts = [{name: column for name, column in rows.items() if name != "eps_id"} for rows in made]
    monkeypatch.setattr("rlio.formats.episode_files._FILE_BYTES", 1)

    def stop(_: int, episodes: int) -> None:
        if episodes == 4:
            raise KeyboardInterrupt

    def convert(**more: Any) -> ImportReport:
        with rlio.from_episodes(parts) as reader:
            return rlio.convert(reader, tmp_path / "b", to="rllib-json", on_error="skip", **more)

    with pytest.raises(KeyboardInterrupt):
        convert(progress=stop)
    report = convert(prove=True)
    assert {f.kind: f.count for f in report.findings if f.kind == "refused"} == {"refused": 1}
    found = rows_of(tmp_path / "b")
    assert found["obs"][:, 0].tolist() == [number for number in (0, 2, 3, 4) for _ in range(4)]


def digest_of(column: np.ndarray, **holds: Any) -> bytes:
    """The digest of a column, of a format that holds all but what is named."""
    return proof._digests({("x",): column}, Holds(**holds))["x"]


def test_the_proof_tells_infos_apart_whose_keys_and_values_join_to_one_text() -> None:
    digests = {digest_of(np.array([info], object)) for info in ({"a": 12}, {"a1": 2})}
    assert len(digests) == 2


def test_the_proof_tells_arrays_in_infos_apart_by_dtype_and_shape() -> None:
    infos = [np.zeros(2, np.float32), np.zeros(2, np.float64), np.zeros((0, 2)), np.zeros((0, 3)), [0.0, 0.0]]
    infos += [np.float32(0), np.float16(0), 0.0]
    lists = [np.array([{"a": info}], object) for info in infos]
    assert len({digest_of(each) for each in lists}) == len(infos)
    by_value = {digest_of(each, dtypes=False) for each in lists}
    assert len(by_value) == 3  # Two zeros, none, and one.
    big = np.arange(3.0).astype(">f8")
    for pair in ([np.arange(3.0), big], [np.float64("nan"), float("nan")], [np.str_("x"), "x"]):
        assert len({digest_of(np.array([{"a": info}], object)) for info in pair}) == 1
    assert digest_of(np.arange(3.0)) == digest_of(big)


def test_the_proof_compares_whole_numbers_exactly_also_where_dtypes_are_lost() -> None:
    def digests(*columns: np.ndarray) -> int:
        return len({digest_of(column, dtypes=False) for column in columns})

    assert digests(np.array([2**53]), np.array([2**53 + 1]), np.array([2.0**53 + 2])) == 3
    large = np.array([2**53 + 1, 2**63 - 1])
    assert digests(large, large.astype(np.uint64)) == 1
    assert digests(large, large.astype(np.float64)) == 2
    assert digests(np.arange(3), np.arange(3.0), np.arange(3, dtype=np.uint8)) == 1


def test_the_proof_takes_texts_of_a_fixed_width_for_texts() -> None:
    texts = np.array(["a", "bcd"])
    assert digest_of(texts) == digest_of(texts.astype(object)) == digest_of(texts.astype("<U9"))
    assert digest_of(texts) != digest_of(np.array(["a", "bce"]))


def test_the_source_as_target_and_an_option_that_is_refused_leave_nothing_behind(tmp_path: Path) -> None:
    record(tmp_path / "a", [3])
    for inside in ("a", "a/b", "a/b.h5"):
        with pytest.raises(OptionError, match="is the source"):
            rlio.convert(tmp_path / "a", tmp_path / inside, to="d3rlpy" if inside.endswith("5") else "npz")
    assert not (tmp_path / "a/b").exists()
    with pytest.raises(OptionError, match="episodes_per_file"):
        rlio.convert(tmp_path / "a", tmp_path / "b", to="npz", options={"episodes_per_file": 0})
    rlio.convert(tmp_path / "a", tmp_path / "b", to="npz", prove=True)


def test_rows_in_sequences_stay_so_in_a_data_set_and_become_steps_elsewhere(tmp_path: Path) -> None:
    rows = episode(1, 6)
    rows["seq_lens"], rows["state_in_0"] = np.array([4, 2], np.int32), np.ones((2, 3), np.float32)
    with rlio.ParquetWriter(tmp_path / "a", spool=None) as writer:
        writer.write(rows)
    rlio.convert(tmp_path / "a", tmp_path / "b", prove=True)
    assert rows_of(tmp_path / "b").equals(rows)
    report = rlio.convert(tmp_path / "a", tmp_path / "c.h5", to="d3rlpy", prove=True)
    assert {f.column for f in report.findings if f.kind == "left_out"} == {"seq_lens", "state_in_0"}


def test_episodes_without_end_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.conversion.episodes._WAITING_ROWS", 50)
    with rlio.ParquetWriter(tmp_path / "a", spool=None) as writer:
        for number in range(20):
            rows = episode(number, 8)
            rows["terminateds"][:] = rows["truncateds"][:] = False
            writer.write(rows)
    found = EpisodeCutter("mixed")
    with rlio.DatasetReader(tmp_path / "a", batch_size=8, epochs=1) as reader:
        for batch in reader:
            assert isinstance(batch, rlio.SampleBatch)
            list(found.add(batch))
            assert found._rows <= 50 + 8
    report = rlio.convert(tmp_path / "a", tmp_path / "b", prove=True)
    assert report.rows == 160
    (note,) = [f.text for f in report.findings if f.kind == "note"]
    assert note.startswith(f"{20 - 6} episodes")


def test_options_of_the_reader_count_and_those_that_change_the_order_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    line = {"type": "SampleBatch", "obs": [[0.0]], "new_obs": [[1.0]], "actions": [0], "rewards": [1.0]}
    good = json.dumps({**line, "terminateds": [True], "truncateds": [False], "eps_id": [1]})
    (tmp_path / "a/output.json").write_text(f"{good}\n{good[:40]}\n{good}\n")
    command = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]
    assert CliRunner().invoke(app, command).exit_code == 1
    ran = CliRunner().invoke(app, [*command, "--read-option", "on_error=skip"])
    assert ran.exit_code == 0, ran.output
    (note,) = [f["text"] for f in json.loads(ran.stdout)["findings"] if f["kind"] == "note"]
    assert note.startswith("1 records")
    for name in ("shuffle", "batch_size", "epochs"):
        with pytest.raises(OptionError):
            rlio.convert(tmp_path / "b", tmp_path / "c", read_options={name: 1})
    rlio.convert(tmp_path / "b", tmp_path / "c", read_options={"columns": ["obs", "eps_id"]})
    assert set(rows_of(tmp_path / "c")) == {"obs", "eps_id"}


def test_the_best_episodes_or_one_side_of_a_split_are_converted_and_no_option_is_ignored(
    tmp_path: Path,
) -> None:
    for writer_number in range(2):
        with rlio.ParquetWriter(tmp_path / "a", spool=None) as writer:
            for number in range(10):
                writer.write(episode(10 * writer_number + number, 1 + number))
    whole = rows_of(tmp_path / "a")
    ids = np.unique(whole["eps_id"])
    returns = {int(each): whole["rewards"][whole["eps_id"] == each].sum() for each in ids}
    least = sorted(returns.values())[15]
    rlio.convert(tmp_path / "a", tmp_path / "b", read_options={"filter": f"episode_return >= {least}"})
    assert set(rows_of(tmp_path / "b")["eps_id"]) == {each for each in returns if returns[each] >= least}
    sides = []
    for side in ("train", "test"):
        rlio.convert(tmp_path / "a", tmp_path / side, read_options={"split": (side, 0.5)})
        sides.append(set(rows_of(tmp_path / side)["eps_id"]))
    assert sides[0] | sides[1] == set(returns)
    assert not sides[0] & sides[1]
    best = {"filter": "episode_return >= quantile(0.9)"}
    for options in (best, {"derive": ["returns_to_go"]}, {"normalise": "mean_std"}, {"draw": rlio.NStep(3)}):
        for src in (tmp_path / "a", rlio.open_dataset(tmp_path / "a")):
            with pytest.raises(OptionError):
                rlio.convert(src, tmp_path / "c", read_options=options)
    rlio.convert(tmp_path / "a", tmp_path / "a.npz", to="npz")
    for draw in (rlio.NStep(3), rlio.Sequences(3), rlio.WholeEpisodes()):
        with pytest.raises(OptionError, match="draw"):  # A conversion of n-step rows would repeat rewards.
            rlio.convert(tmp_path / "a.npz", tmp_path / "c", read_options={"draw": draw})


def test_columns_that_the_format_cannot_hold_are_named(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path / "a", spool=None) as writer:
        writer.write(episode(0, 4, action_logp=np.zeros(4)))
    report = rlio.convert(tmp_path / "a", tmp_path / "c.h5", to="d3rlpy", prove=True)
    assert [(f.kind, f.column) for f in report.findings] == [
        ("left_out", "action_logp"),
        ("final_obs_lost", None),
    ]


def test_the_command_prints_a_table_or_one_json_object(tmp_path: Path) -> None:
    record(tmp_path / "a", [3, 4])
    with h5py.File(tmp_path / "d4rl.hdf5", "w") as file:
        file["observations"] = np.arange(8, dtype=np.float32)[:, None]
        file["actions"], file["rewards"] = np.zeros((8, 1), np.float32), np.ones(8, np.float32)
        file["terminals"] = np.arange(8) == 3
    plain = CliRunner().invoke(app, ["convert", str(tmp_path / "d4rl.hdf5"), str(tmp_path / "b"), "--prove"])
    assert plain.exit_code == 0, plain.output
    assert "no_timeouts" in plain.output
    assert "2 episodes, 8 rows, 8 written now, proved equal" in plain.output
    ran = CliRunner().invoke(app, ["convert", str(tmp_path / "d4rl.hdf5"), str(tmp_path / "c"), "--json"])
    found = json.loads(ran.stdout)
    assert {f["kind"] for f in found["findings"]} == {"no_final_obs", "unfinished", "no_timeouts", "note"}
    assert set(found) - {"warnings"} == set(ImportReport.__annotations__)
    none = CliRunner().invoke(app, ["convert", str(tmp_path / "none"), str(tmp_path / "d")])
    assert none.exit_code == 2


def test_after_a_refusal_that_stored_nothing_the_folder_takes_other_options(tmp_path: Path) -> None:
    rows = rlio.SampleBatch(obs=[[0.0], [1.0]], actions=[0, 1], rewards=[1.0, 1.0], eps_id=[1, 1])
    rows["new_obs"], rows["new_obs_valid"] = np.array([[1.0], [0.0]]), np.array([True, False])
    rows["terminateds"] = np.array([False, False])
    with rlio.ParquetWriter(tmp_path / "a") as writer:
        writer.write(rows)
    with pytest.raises(SchemaError):
        rlio.convert(tmp_path / "a", tmp_path / "b", to="minari")
    report = rlio.convert(tmp_path / "a", tmp_path / "b", to="minari", final_obs="repeat")
    assert report.written == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("t", [True, False])
def test_episodes_of_one_id_in_several_files_are_converted_as_several_episodes(
    t: bool, tmp_path: Path
) -> None:
    """Each file has the episodes 0 to 9, as if written by another process."""
    (tmp_path / "a").mkdir()
    for number in range(3):
        lines = []
        for eps_id in range(10):
            rows = episode(eps_id, 3 + number)
            keys = (
                "obs",
                "actions",
                "rewards",
                "terminateds",
                "truncateds",
                "eps_id",
                *(("t",) if t else ()),
            )
            lines.append(json.dumps({"type": "SampleBatch", **{key: rows[key].tolist() for key in keys}}))
        (tmp_path / f"a/output-{number}.json").write_text("\n".join(lines) + "\n")
    report = rlio.convert(tmp_path / "a", tmp_path / "b", prove=True)
    assert report.episodes == 30
    data = rlio.open_dataset(tmp_path / "b")
    assert data.episode_count == 30
    assert sorted(len(data.episode(i)) for i in range(30)) == sorted([3, 4, 5] * 10)
    assert sorted(data.episode(i).id_ for i in range(30)) == sorted([*range(10)] * 3)
    assert rlio.verify(tmp_path / "b").ok
    assert rlio.convert(tmp_path / "a", tmp_path / "b").written == 0, "it is complete"


@pytest.mark.parametrize("joint", [False, True])
def test_both_passes_of_a_proved_conversion_show_their_progress(tmp_path: Path, joint: bool) -> None:
    """The second pass, of the proof, showed none."""
    rows = rlio.SampleBatch(
        obs=np.arange(20.0), actions=np.zeros(20), rewards=np.ones(20), eps_id=np.arange(20) // 5
    )
    rows["t"] = np.arange(20) % 5
    with rlio.ParquetWriter(tmp_path / "a") as writer:
        writer.write(rlio.MultiAgentBatch({"a": rows, "b": rows}, 20) if joint else rows)
    seen: list[tuple[Any, ...]] = []

    class Shown:
        def begin(self, name: str, total: int | None) -> None:
            seen.append((name, total))

        def __call__(self, rows: int, episodes: int) -> None:
            seen.append((rows, episodes))

    rlio.convert(tmp_path / "a", tmp_path / "b", prove=True, progress=Shown())
    passes = [place for place, one in enumerate(seen) if isinstance(one[0], str)]
    assert [seen[place] for place in passes] == [
        ("convert", 40 if joint else 20),
        ("prove", 80 if joint else 20),
    ]
    assert seen[passes[1] - 1][0] == (40 if joint else 20)
    assert seen[-1] == ((80, 0) if joint else (20, 4))
