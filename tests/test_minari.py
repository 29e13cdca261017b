"""Minari data sets, read and written. Minari wrote the fixtures: tests/golden/formats/minari/make.py.

Observation t of episode e holds 100 e + t, and action and reward t of it 100 e + t + 0.5, so that each number
says where it belongs.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gymnasium import spaces
from sinks import write_episodes

import rlio
from rlio.batch.episode import Episode
from rlio.errors import CorruptData, OptionError, SchemaError, UnknownLayout, UnsafeData
from rlio.formats.files import parquet_files
from rlio.formats.minari import source as minari_source
from rlio.formats.minari.sink import MinariSink
from rlio.formats.minari.source import MinariSource
from rlio.formats.minari.spaces import space_of_minari
from rlio.formats.place import locate_format
from rlio.formats.sink import Origin, PreparedEpisode
from rlio.formats.tables.arrow import ArrowTable
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.readers.episode_reader import EpisodeReader
from rlio.storage import Storage

GOLDEN = Path(__file__).with_name("golden") / "formats/minari"
NESTED = [GOLDEN / f"nested/{kind}-v0" for kind in ("hdf5", "arrow", "parquet")]


def all_rows(root: Any, **options: Any) -> Any:
    with rlio.read(root, epochs=1, **options) as reader:
        return rlio.concat_samples(list(reader))


def open_source(root: Path, limits: Limits = DEFAULT_LIMITS) -> MinariSource:
    return MinariSource(locate_format(root)[1], limits=limits)


def check_nested(rows: Any, steps: np.ndarray) -> None:
    for name, at in (("obs", steps), ("new_obs", steps + 1)):
        found = rows[name]
        assert found["position"].tolist() == np.stack([at, -at], 1).tolist()
        assert found["position"].dtype == np.float32
        assert found["mode"].tolist() == (at % 4 - 1).tolist()
        assert found["name"].tolist() == [f"at{n}" for n in at]
        assert found["pair"][0].tolist() == np.stack([at, at + 0.25], 1)[:, None].tolist()
        assert found["pair"][1].tolist() == np.stack([at % 2, 1 - at % 2], 1).tolist()
        assert found["pair"][1].dtype == np.int8
    assert rows["actions"][0].tolist() == (steps + 0.5).tolist()
    assert rows["actions"][0].dtype == np.float32
    assert rows["actions"][1].tolist() == np.stack([steps % 3, steps % 4], 1).tolist()
    assert rows["rewards"].tolist() == (steps + 0.5).tolist()


@pytest.mark.few(2)
@pytest.mark.parametrize("root", NESTED, ids=lambda root: root.name)
def test_every_value_is_in_the_row_of_its_step(root: Path) -> None:
    for place in (root, root / "data"):
        rows = all_rows(place)
        check_nested(rows, np.array([0, 1, 2, 100, 101]))
        assert rows["terminateds"].tolist() == [False, False, True, False, False]
        assert rows["truncateds"].tolist() == [False, False, False, False, True]
        assert rows["env_seed"].tolist() == [7, 7, 7, -1, -1]
        assert rows["eps_id"].tolist() == [0, 0, 0, 1, 1]
        assert "new_obs_valid" not in rows


def test_spaces_env_spec_and_metadata_are_those_of_the_data_set() -> None:
    source = open_source(NESTED[0])
    observation, action = source.spaces or (None, None)
    assert observation == spaces.Dict(
        position=spaces.Box(-np.inf, np.inf, (2,), np.float32),
        mode=spaces.Discrete(5, start=-1),
        name=spaces.Text(8),
        pair=spaces.Tuple((spaces.Box(0, 1000, (1, 2), np.float64), spaces.MultiBinary(2))),
    )
    assert action == spaces.Tuple((spaces.Box(-1000, 1000, (), np.float32), spaces.MultiDiscrete([3, 4])))
    assert json.loads(source.origin.env or "")["id"] == "CartPole-v1"
    assert source.origin.extra["author"] == ["rlio"]
    source.close()


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "root", [*NESTED, *(GOLDEN / f"images/{n}-v0" for n in ("jpeg", "jpeg-arrow", "raw"))]
)
def test_parts_of_an_episode_are_the_rows_of_the_whole(root: Path) -> None:
    """A long episode of Arrow or Parquet was read as a whole."""
    source = open_source(root)
    assert source.reads_parts
    for number, steps in enumerate(source.lengths):
        whole = source.load(number, None)
        for size in (1, 2):
            parts = [
                source.load_part(number, at, min(at + size, steps), None) for at in range(0, steps, size)
            ]
            assert rlio.concat_samples(parts).equals(whole)
    source.close()


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_a_part_of_a_long_episode_decodes_its_own_pictures_and_reads_each_piece_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pictures of a long episode were decoded at once."""
    shutil.copytree(GOLDEN / "images/jpeg-arrow-v0", tmp_path / "a")
    old = tmp_path / "a/data/0/part-0.arrow"
    with pa.OSFile(str(old)) as file:
        table = pa.ipc.open_file(file).read_all()
    steps = 40
    rows = table.take([n % (len(table) - 1) for n in range(steps + 1)])
    shutil.rmtree(tmp_path / "a/data/1")
    change_json(total_episodes=1, total_steps=steps, data_format=kind)(tmp_path / "a")
    about = tmp_path / "a/data/0/metadata.json"
    about.write_text(json.dumps({"total_steps": steps}))
    if kind == "arrow":
        with pa.OSFile(str(old), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=15)
    else:
        old.unlink()
        pq.write_table(rows, old.with_suffix(".parquet"), row_group_size=25)
    expected = all_rows(tmp_path / "a", shuffle=False)
    decoded, scans, batches = list[int](), list[int](), list[int]()

    def counted(real: Any, found: list[int], measure: Callable[..., int]) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            found.append(measure(*args))
            return real(*args, **options)

        return call

    decode, decode_arrow = minari_source.encoded_column, ArrowTable.decode
    monkeypatch.setattr(minari_source, "encoded_column", counted(decode, decoded, lambda rows, *_: len(rows)))
    monkeypatch.setattr(
        ArrowTable, "decode", counted(decode_arrow, batches, lambda _, file, piece, *__: piece)
    )
    monkeypatch.setattr(parquet_files, "_Scan", counted(parquet_files._Scan, scans, lambda key, *_: key[1]))
    monkeypatch.setattr("rlio.source.episodes._GROUP_ROWS", 4)
    found = all_rows(tmp_path / "a", shuffle=False, cache="none")
    assert found.equals(expected)
    assert max(decoded[1:]) == 5  # The steps of a part, and the observation after them; at first, a sample.
    # Three batches: a sample of all, the sum of the rewards, and each once more for its parts.
    assert len(batches) == (9 if kind == "arrow" else 0)
    assert len(scans) <= 8


@pytest.mark.parametrize("name", ["jpeg-v0", "jpeg-arrow-v0", "raw-v0"])
def test_pictures_are_decoded_where_they_are_jpeg_and_raw_where_they_are_not(name: str) -> None:
    rows = all_rows(GOLDEN / "images" / name)
    expected = np.array([0, 1, 2, 100, 101])
    assert rows["obs"].shape == (5, 32, 40, 3)
    # JPEG keeps a plane of one grey to a step or so.
    assert np.abs(rows["obs"].astype(int) - expected[:, None, None, None]).max() <= (name != "raw-v0")
    assert rows["actions"].tolist() == [0, 1, 2, 0, 1]


def test_pictures_of_another_size_than_the_space_are_refused_before_they_are_decoded(tmp_path: Path) -> None:
    from PIL import Image

    shutil.copytree(GOLDEN / "images/jpeg-arrow-v0", tmp_path / "a")
    path = tmp_path / "a/data/0/part-0.arrow"
    table = pa.ipc.open_file(path).read_all()
    stream = io.BytesIO()
    Image.new("RGB", (3000, 3000)).save(stream, format="JPEG")
    bombs = pa.array([stream.getvalue()] * len(table), pa.binary())
    write_arrow(path, table.set_column(table.column_names.index("observations"), "observations", bombs))
    with pytest.raises(CorruptData, match="3000"):
        all_rows(tmp_path / "a")
    bounded = open_source(GOLDEN / "images/jpeg-v0", Limits(group_bytes=10_000))
    with closing(bounded), pytest.raises(UnsafeData):
        bounded.load(0, None)


def write_arrow(path: Path, table: pa.Table, **options: Any) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, **options) as file:
        file.write_table(table)


def test_an_id_is_found_below_minaris_folder_where_no_such_path_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(GOLDEN))
    monkeypatch.chdir(tmp_path)
    assert len(all_rows("nested/hdf5-v0")) == 5
    with EpisodeReader("nested/arrow-v0", format="minari") as reader:
        assert reader.source.uri.endswith("golden/formats/minari/nested/arrow-v0")
    for absent in ("nested/other-v0", "nested", "../minari/nested/hdf5-v0"):
        with pytest.raises((rlio.errors.DataNotFound, OptionError)):
            all_rows(absent)
    (tmp_path / "nested/hdf5-v0").mkdir(parents=True)
    with pytest.raises(rlio.errors.DataNotFound):  # The path is there, and empty.
        all_rows("nested/hdf5-v0")


def change_json(**values: Any) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = root / "data/metadata.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def change_hdf5(action: Callable[[Any], Any]) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        with h5py.File(root / "data/main_data.hdf5", "r+") as file:
            action(file)

    return change


def replaced(path: str, value: Any) -> Callable[[Path], None]:
    def change(file: Any) -> None:
        del file[path]
        if value is not None:
            file[path] = value

    return change_hdf5(change)


def no_group(file: Any, path: str) -> None:
    """Put a dataset with the attributes of a group in its place."""
    attributes = dict(file[path].attrs)
    del file[path]
    file[path] = np.zeros(3)
    file[path].attrs.update(attributes)


COLLECTED = GOLDEN / "cart/collected-v0"


@pytest.mark.few(11)
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (change_json(total_steps=13), CorruptData),
        (change_json(total_episodes=3), CorruptData),
        (change_json(total_episodes=1), CorruptData),
        (change_json(total_episodes=-1), CorruptData),
        (change_json(data_format="zarr"), UnknownLayout),
        (change_json(observation_space="{"), CorruptData),
        (change_json(observation_space='{"type": "Graph"}'), SchemaError),
        (replaced("episode_1/rewards", np.ones(5)), CorruptData),
        (replaced("episode_1/rewards", np.full(6, 2.0)), CorruptData),  # rewards_sum
        (replaced("episode_1/actions", np.ones(7, int)), CorruptData),
        (replaced("episode_1/observations", np.zeros((6, 4), np.float32)), CorruptData),
        (replaced("episode_1/observations", np.zeros((7, 3), np.float32)), SchemaError),
        (replaced("episode_1/terminations", None), CorruptData),
        (replaced("episode_1/actions", np.dtype("f4")), CorruptData),  # A type, not data of it.
        (change_hdf5(lambda file: no_group(file, "episode_1")), CorruptData),
        (replaced("episode_1/actions", h5py.ExternalLink("secret.h5", "/x")), UnsafeData),
        (replaced("episode_1/actions", h5py.SoftLink("/episode_0/actions")), UnsafeData),
        (replaced("episode_1", h5py.SoftLink("/episode_0")), UnsafeData),
        (change_hdf5(lambda file: file["episode_0"].attrs.update(total_steps="x")), CorruptData),
        (lambda root: (root / "data/main_data.hdf5").write_bytes(b"no HDF5"), CorruptData),
        (lambda root: (root / "data/main_data.hdf5").unlink(), CorruptData),
    ],
)
def test_what_disagrees_with_the_metadata_or_is_damaged_is_refused(
    change: Callable[[Path], Any], error: type[Exception], tmp_path: Path
) -> None:
    assert len(all_rows(COLLECTED)) == 12
    shutil.copytree(COLLECTED, tmp_path / "a")
    change(tmp_path / "a")
    with pytest.raises(error) as raised:
        all_rows(tmp_path / "a")
    assert str(tmp_path / "a") in str(raised.value)


def test_a_damaged_episode_is_skipped_and_the_others_are_served(tmp_path: Path) -> None:
    shutil.copytree(COLLECTED, tmp_path / "a")
    with h5py.File(tmp_path / "a/data/main_data.hdf5", "r+") as file:
        del file["episode_1/actions"]
    source = open_source(tmp_path / "a")
    assert len(source.load(0, None)) == 6
    with pytest.raises(CorruptData):
        source.load(1, None)
    assert set(source.load(1, frozenset(("rewards",)))) == {
        "rewards",
        "terminateds",
        "truncateds",
        "env_seed",
    }
    source.close()


def test_arrow_files_with_padding_lost_or_extensions_are_refused_and_compressed_ones_read(
    tmp_path: Path,
) -> None:
    shutil.copytree(NESTED[1], tmp_path / "a")
    path = tmp_path / "a/data/0/part-0.arrow"
    table = pa.ipc.open_file(path).read_all()
    write_arrow(path, table.slice(0, 3))
    with pytest.raises(CorruptData, match="3 steps"):
        all_rows(tmp_path / "a")
    write_arrow(path, table, options=pa.ipc.IpcWriteOptions(compression="zstd"))
    assert len(all_rows(tmp_path / "a")) == len(all_rows(NESTED[1]))
    kind = table.schema.field("rewards").with_metadata({"ARROW:extension:name": "x.y"})
    fields = [kind if field.name == "rewards" else field for field in table.schema]
    write_arrow(path, table.cast(pa.schema(fields)))
    with pytest.raises(UnsafeData):
        all_rows(tmp_path / "a")
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(CorruptData):
        all_rows(tmp_path / "a")


def test_seeds_of_64_bits_are_kept_without_a_sign(tmp_path: Path) -> None:
    shutil.copytree(COLLECTED, tmp_path / "a")
    with h5py.File(tmp_path / "a/data/main_data.hdf5", "r+") as file:
        file["episode_0"].attrs["seed"] = np.uint64(2**64 - 5)
    assert all_rows(tmp_path / "a")["env_seed"].tolist() == [2**64 - 5] * 6 + [4] * 6


def odd_types() -> dict[str, tuple[str, Any]]:
    """Types that are stored in other bits, or more bytes, than those that h5py gives: dataset and type."""
    bits = h5py.h5t.STD_I32LE.copy()
    bits.set_precision(20)
    bits.set_offset(4)
    brain = h5py.h5t.IEEE_F32LE.copy()
    brain.set_fields(15, 7, 8, 0, 7)
    brain.set_precision(16)
    brain.set_size(2)
    wide = h5py.h5t.enum_create(h5py.h5t.STD_I32LE)
    wide.enum_insert(b"FALSE", 0)
    wide.enum_insert(b"TRUE", 1)
    return {
        "numbers of 20 bits": ("actions", bits),
        "bfloat16": ("rewards", brain),
        "truth values of four bytes": ("terminations", wide),
        "big endian": ("rewards", h5py.h5t.IEEE_F64BE),
    }


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("kind", odd_types())
def test_numbers_that_are_stored_otherwise_than_numpy_holds_them_are_read(
    kind: str, chunk: int | None, tmp_path: Path
) -> None:
    """Their bytes were taken for NumPy's; truth values of four bytes were written beyond the array."""
    shutil.copytree(COLLECTED, tmp_path / "a")
    name, stored = odd_types()[kind]
    with h5py.File(tmp_path / "a/data/main_data.hdf5", "r+") as file:
        for episode in (0, 1):
            group = file[f"episode_{episode}"]
            values = group[name][()]
            del group[name]
            how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            if chunk is not None:
                how.set_chunk((chunk,))
            space = h5py.h5s.create_simple(values.shape)
            low = h5py.h5d.create(group.id, name.encode(), stored, space, how)
            low.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
            if name == "rewards":
                total = h5py.h5a.create(group.id, b"total", stored, h5py.h5s.create(h5py.h5s.SCALAR))
                total.write(np.array(values.sum()))
                del group.attrs["rewards_sum"]
                h5py.h5a.rename(group.id, b"total", b"rewards_sum")
    found, expected = all_rows(tmp_path / "a"), all_rows(COLLECTED)
    assert all(found[column].tolist() == expected[column].tolist() for column in expected)


def test_minaris_own_fields_come_back_by_way_of_a_data_set_of_rlio(tmp_path: Path) -> None:
    shutil.copytree(COLLECTED, tmp_path / "a")
    own = {
        "author": ["A", "B"],
        "author_email": ["a@b.c"],
        "algorithm_name": "SAC",
        "code_permalink": "https://x.y",
        "description": "Runs.",
        "ref_max_score": 9.5,
    }
    change_json(**own)(tmp_path / "a")
    rlio.convert(tmp_path / "a", tmp_path / "b")
    rlio.convert(tmp_path / "b", tmp_path / "c", to="minari", prove=True)
    found = json.loads((tmp_path / "c/data/metadata.json").read_text())
    assert {name: found.get(name) for name in own} == own


@pytest.mark.parametrize("name", ["cart/collected-v0", "nested/arrow-v0"])
def test_the_seed_none_as_text_is_no_seed_and_other_texts_are_damage(name: str, tmp_path: Path) -> None:
    def write(seed: str) -> None:
        if name.startswith("cart"):
            with h5py.File(tmp_path / "a/data/main_data.hdf5", "r+") as file:
                file["episode_0"].attrs["seed"] = seed
            return
        path = tmp_path / "a/data/0/metadata.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"seed": seed}))

    shutil.copytree(GOLDEN / name, tmp_path / "a")
    write("None")
    rows = all_rows(tmp_path / "a")
    assert set(rows["env_seed"][rows["eps_id"] == 0].tolist() if "env_seed" in rows else [-1]) == {-1}
    write("7x")
    with pytest.raises(CorruptData, match="7x"):
        all_rows(tmp_path / "a")


@pytest.mark.parametrize("flag", ["terminations", "truncations"])
def test_an_end_in_the_middle_of_an_episode_is_in_the_report(flag: str, tmp_path: Path) -> None:
    shutil.copytree(COLLECTED, tmp_path / "a")
    with h5py.File(tmp_path / "a/data/main_data.hdf5", "r+") as file:
        file[f"episode_1/{flag}"][2] = True
    report = rlio.convert(tmp_path / "a", tmp_path / "b")
    found = {finding.kind: finding for finding in report.findings if finding.kind != "note"}
    after = found["rows_after_end"]
    assert (after.count, after.first) == (3, "episode 1 (eps_id 1), row 3")
    notes = [finding.text for finding in report.findings if finding.kind == "note"]
    assert [note for note in notes if "after one that ends them" in note] == notes[1:]
    assert len(notes) == 2


def test_text_that_repeats_few_bytes_is_bounded(tmp_path: Path) -> None:
    shutil.copytree(NESTED[0], tmp_path / "a")
    with h5py.File(tmp_path / "a/data/main_data.hdf5", "r+") as file:
        del file["episode_0/observations/name"]
        file["episode_0/observations"].create_dataset(
            "name", data=["x" * 50_000] * 4, dtype=h5py.string_dtype()
        )
    assert len(all_rows(tmp_path / "a")) == 5
    with pytest.raises(UnsafeData):
        open_source(tmp_path / "a", Limits(group_bytes=100_000)).load(0, None)


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "Box", "dtype": "float32", "shape": [1000000, 1000000], "low": 0, "high": 1}',
        '{"type": "Discrete", "n": 0, "start": 0}',
        '{"type": "Box", "dtype": "object", "shape": [1], "low": [0], "high": [1]}',
        '{"type": "Box", "dtype": "float32", "shape": [1], "low": [NaN], "high": [1]}',
        '{"type": "__import__"}',
        '{"type": "Tuple", "subspaces": [' * 40 + "]}" * 40,
        "[" * 100_000,
        '{"type": "Box"}',
        "[]",
    ],
)
def test_spaces_that_are_none_or_too_large_are_refused(text: str) -> None:
    with pytest.raises((CorruptData, SchemaError)):
        space_of_minari(text)


# ---- writing ----


def written(root: Path, episodes: list[Episode], origin: Origin | None = None, **options: Any) -> Path:
    return write_episodes("minari", root, episodes, origin, **options)


def episodes_of(source: Any) -> list[Episode]:
    return [
        Episode.from_batch(source.load(number, None), id_=number) for number in range(len(source.lengths))
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
@pytest.mark.parametrize("root", [*NESTED, GOLDEN / "images/raw-v0", COLLECTED], ids=lambda root: root.name)
@pytest.mark.each_value_once
def test_what_is_read_is_written_so_that_it_is_read_again(
    root: Path, data_format: Any, tmp_path: Path
) -> None:
    source = open_source(root)
    written(tmp_path / "copy-v3", episodes_of(source), source.origin, data_format=data_format)
    source.close()
    metadata = json.loads((tmp_path / "copy-v3/data/metadata.json").read_text())
    assert metadata["jpeg_encoding"] is False  # Minari takes pictures for JPEG files otherwise.
    again = open_source(tmp_path / "copy-v3")
    assert again.spaces == source.spaces
    assert again.origin.env == source.origin.env
    assert again.origin.extra == {**source.origin.extra, "dataset_id": "copy-v3"}
    before, after = all_rows(root), all_rows(tmp_path / "copy-v3")
    assert set(before) == set(after)
    for name in before:
        np.testing.assert_equal(after[name], before[name])
    again.close()


def an_episode(steps: int = 3, *, final: bool = True, **options: Any) -> Episode:
    observations = np.arange(steps + final, dtype=np.float32)[:, None]
    return Episode(5, observations=observations, actions=np.arange(steps), rewards=np.ones(steps), **options)


def test_an_unknown_final_observation_is_refused_repeated_or_dropped_as_asked(tmp_path: Path) -> None:
    def converted(name: str, episode: Episode, **options: Any) -> Path:
        with rlio.ParquetWriter(tmp_path / f"{name}-own", spool=None) as writer:
            writer.write(episode.to_batch())
        rlio.convert(tmp_path / f"{name}-own", tmp_path / name, to="minari", **options)
        return tmp_path / name

    episode = an_episode(final=False, terminated=True)
    with pytest.raises(SchemaError, match="final_obs="):
        converted("a", episode)
    rows = all_rows(converted("b", episode, final_obs="repeat", prove=True))
    assert rows["new_obs"][:, 0].tolist() == [1, 2, 2]
    assert rows["terminateds"].tolist() == [False, False, True]
    rows = all_rows(converted("c", episode, final_obs="drop-step", prove=True))
    assert rows["new_obs"][:, 0].tolist() == [1, 2]
    assert rows["actions"].tolist() == [0, 1]
    assert (rows["terminateds"].any(), rows["truncateds"].tolist()) == (False, [False, True])
    for options in ({"final_obs": "x"}, {"options": {"final_obs": "repeat"}}):
        with pytest.raises(OptionError, match="final_obs"):
            converted("d", episode, **options)
    for options in ({"data_format": "parquet"}, {"dataset_id": "no version"}):
        with pytest.raises(OptionError):
            written(tmp_path / "e", [], **options)


def test_columns_that_minari_has_not_are_left_out_and_named(tmp_path: Path) -> None:
    infos = np.array([{"a": 1}] * 3, object)
    extra = {"action_logp": np.zeros(3), "env_seed": np.full(3, 8)}
    with rlio.ParquetWriter(tmp_path / "own", spool=None) as writer:
        writer.write(an_episode(infos=infos, extra_outputs=extra).to_batch())
    report = rlio.convert(tmp_path / "own", tmp_path / "a", to="minari")
    assert {f.column for f in report.findings if f.kind == "left_out"} == {"action_logp", "infos"}
    assert all_rows(tmp_path / "a")["env_seed"].tolist() == [8, 8, 8]


def test_spaces_that_are_not_known_are_those_of_all_values_and_others_are_held_to(tmp_path: Path) -> None:
    with EpisodeReader(written(tmp_path / "a", [an_episode(truncated=True)])) as reader:
        bounds = np.iinfo(np.int64)
        assert reader.spaces == (
            spaces.Box(-np.inf, np.inf, (1,), np.float32),
            spaces.Box(bounds.min, bounds.max, (), np.int64),
        )
    pair = (spaces.Box(0, 1, (2,)), spaces.Discrete(3))
    with pytest.raises(SchemaError):
        written(tmp_path / "b", [an_episode()], Origin(uri="x", spaces=pair))
    with pytest.raises(SchemaError):
        written(tmp_path / "c", [an_episode()], Origin(uri="x", spaces=(spaces.Dict(a=pair[0]), pair[1])))


def test_an_interrupted_sink_leaves_no_data_set_and_another_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    for data_format in ("hdf5", "arrow"):
        root = tmp_path / data_format
        written(root, [an_episode(), an_episode()], data_format=data_format)
        sink = MinariSink(Storage.open(root), Origin(uri="x"), data_format=data_format)
        assert sink.episodes == 0
        sink.write(PreparedEpisode.of(an_episode()))
        assert not (root / "data/metadata.json").exists()
        sink.abort()
        assert len(all_rows(written(root, [an_episode(4)], data_format=data_format))) == 4
        assert not [*root.glob("data/1/*")]
    assert not [*(tmp_path / "temporary").iterdir()]
