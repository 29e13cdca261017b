"""What a user may write as an input or output, what becomes of it, and how mistakes are answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from counting import Counting, Keeping, rows_of

import rlio
from rlio import resolve
from rlio.batch import SampleBatch, concat_samples
from rlio.errors import DataNotFound, OptionError, UnknownName
from rlio.formats.place import Recognised
from rlio.reader import InputReader
from rlio.readers.dataset_reader import DatasetReader
from rlio.readers.json_reader import JsonReader
from rlio.readers.mixed_input import MixedInput
from rlio.resolve import IOContext, read, register_input, register_output, resolve_input, resolve_output
from rlio.testing import assert_same
from rlio.writer import OutputWriter
from rlio.writers.noop_output import NoopOutput
from rlio.writers.parquet_writer import ParquetWriter


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each test registers for itself, in a folder of its own."""
    monkeypatch.setattr(resolve._inputs, "_creators", {})
    monkeypatch.setattr(resolve._outputs, "_creators", {})
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any, dict[str, Any]]]]:
    """Records which class a stored input is opened with, in place of opening it."""
    calls: list[tuple[str, Any, dict[str, Any]]] = []

    def fake(place: str) -> Any:
        if place == resolve._MIXED_INPUT:
            return MixedInput

        def make(inputs: Any, **options: Any) -> InputReader:
            given = inputs.inputs if isinstance(inputs, Recognised) else inputs
            calls.append((place.rpartition(":")[2], given, options))
            return Counting(None)

        return make

    monkeypatch.setattr(resolve, "_class", fake)
    return calls


def touch(*names: str) -> None:
    for name in names:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def record(rows: SampleBatch) -> str:
    """A line as RLlib writes it, nothing packed."""
    return json.dumps({"type": "SampleBatch", **{name: rows[name].tolist() for name in rows}}) + "\n"


# ---- inputs: objects, functions, names ----


def test_a_reader_is_itself() -> None:
    reader = Counting(3)
    assert read(reader) is reader


def test_a_function_gets_the_context() -> None:
    seen = []

    def create(context: IOContext) -> InputReader:
        seen.append(context)
        return Counting(3)

    context = IOContext(worker_index=2, num_workers=3, options={"rows": 3})
    assert isinstance(resolve_input(create, context), Counting)
    assert seen == [context]


def test_a_class_gets_the_options_as_keywords() -> None:
    reader = read(Counting, total=7, sizes=(2,))
    assert isinstance(reader, Counting)
    assert (reader.total, reader.sizes) == (7, [2])


def test_a_registered_name_wins_over_a_folder_and_a_dot_means_the_folder(
    opened: list[tuple[str, Any, dict[str, Any]]],
) -> None:
    touch("mine/a.json")
    register_input("mine", Counting)
    assert isinstance(read("mine", total=1), Counting)
    assert opened == []
    read("./mine")
    assert opened == [("JsonReader", "./mine", {})]


def test_a_name_may_be_registered_again() -> None:
    register_input("mine", lambda context: Counting(1))
    register_input("mine", lambda context: Counting(2))
    reader = read("mine")
    assert isinstance(reader, Counting)
    assert reader.total == 2


def test_the_sampler_is_the_workers_own() -> None:
    sampler = Counting(3)
    assert resolve_input("sampler", IOContext(default_sampler_input=lambda: sampler)) is sampler
    with pytest.raises(OptionError, match="RolloutWorker"):
        read("sampler")


@pytest.mark.parametrize("name", ["", "sampler", 3])
def test_a_name_that_cannot_be_registered_raises(name: Any) -> None:
    with pytest.raises(OptionError, match="cannot be the name of an input"):
        register_input(name, Counting)


def test_a_creator_that_cannot_be_called_raises() -> None:
    with pytest.raises(OptionError, match="function of IOContext"):
        register_output("mine", "path")  # type: ignore[arg-type]  # on purpose


def test_a_creator_that_gives_no_reader_raises_and_is_named() -> None:
    register_input("mine", lambda context: None)  # type: ignore[arg-type, return-value]  # on purpose
    with pytest.raises(OptionError, match=r"the input 'mine' gave None.*InputReader"):
        read("mine")


# ---- inputs: paths ----


@pytest.mark.few(10)
@pytest.mark.parametrize(
    ("files", "value", "kind"),
    [
        (["a.json"], "a.json", "JsonReader"),
        (["d/a.json", "d/b.jsonl"], "d", "JsonReader"),
        (["d/a.json", "d/notes.txt"], "d", "JsonReader"),
        (["d/a.zip"], "d/*.zip", "JsonReader"),
        (["d/a.json"], Path("d"), "JsonReader"),
        (["a.hdf5"], "a.hdf5", "EpisodeReader"),
        (["A.H5"], "A.H5", "EpisodeReader"),
        (["d/a.parquet", "d/_SUCCESS"], "d", "ForeignParquetReader"),
        (["d/a.parquet", "d/b.json"], "d/*.parquet", "ForeignParquetReader"),
        (["d/a.json"], ["d/a.json"], "JsonReader"),
        (["d4rl_cartpole/a.json"], "d4rl_cartpole/*.json", "JsonReader"),
        (["sampler/a.json"], "./sampler", "JsonReader"),
        (["s3/dataset/a.json"], "s3/dataset", "JsonReader"),
        (["d/_rlio.json"], "d", "DatasetReader"),
        (["d/_rlio.json", "d/extra.json"], "d/", "DatasetReader"),
        (["d/_rlio.json", "d/extra.json"], "d/*.json", "JsonReader"),
        (["run.json/_rlio.json"], "run.json", "DatasetReader"),
        (["run.parquet/_rlio.json"], "run.parquet", "DatasetReader"),
        (["run.zip/a.json"], "run.zip", "JsonReader"),
    ],
)
def test_a_path_opens_the_reader_of_what_is_there(
    opened: list[tuple[str, Any, dict[str, Any]]], files: list[str], value: Any, kind: str
) -> None:
    touch(*files)
    read(value, epochs=1)
    passed = value[0] if isinstance(value, list) else value
    assert opened == [(kind, passed, {"epochs": 1})]


def test_a_list_of_paths_is_one_reader(opened: list[tuple[str, Any, dict[str, Any]]]) -> None:
    touch("a.json", "d/b.json")
    read(["a.json", Path("d")])
    assert opened == [("JsonReader", ["a.json", Path("d")], {})]


def test_a_uri_is_opened_untouched(opened: list[tuple[str, Any, dict[str, Any]]]) -> None:
    import fsspec

    fsspec.filesystem("memory").pipe_file("/resolve/a.json", b"")
    read("memory://resolve/*.json")
    read("memory://resolve")
    assert [call[:2] for call in opened] == [
        ("JsonReader", "memory://resolve/*.json"),
        ("JsonReader", "memory://resolve"),
    ]


def test_workers_get_disjoint_shards_and_their_seed(opened: list[tuple[str, Any, dict[str, Any]]]) -> None:
    touch("a.json")
    resolve_input("a.json", IOContext(worker_index=2, num_workers=3, seed=5, options={"shuffle": True}))
    resolve_input("a.json", IOContext(worker_index=2, num_workers=3, seed=5, options={"shard": (0, 9)}))
    resolve_input("a.json", IOContext(worker_index=0, num_workers=3, options={"shuffle": True, "seed": 1}))
    assert [options for _, _, options in opened] == [
        {"shuffle": True, "shard": (1, 3), "seed": 5},
        {"shard": (0, 9)},
        {"shuffle": True, "seed": 1},
    ]


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("files", "value", "error", "message"),
    [
        ([], "nowhere", DataNotFound, r"no input has that name either: the names are .*sampler"),
        ([], "./nowhere", DataNotFound, "nowhere"),
        ([], "no/*.json", DataNotFound, "no"),
        ([], "foo://bucket/x", UnknownName, "foo"),
        (["d/a.txt", "d/b.txt"], "d", OptionError, r"2 files, of no kind that is known.*a\.txt.*b\.txt"),
        (["d/a.json", "d/b.parquet"], "d", OptionError, "1 for JsonReader, 1 for ForeignParquetReader"),
        (["a.json", "b.h5"], ["a.json", "b.h5"], OptionError, "1 for JsonReader, 1 for D4RLReader"),
        (["a/_rlio.json", "b/x.csv"], ["a", "b"], OptionError, "a list has one kind"),
        ([], [], OptionError, "expected a reader"),
        ([], 3, OptionError, "expected a reader"),
        ([], None, OptionError, "expected a reader"),
        ([], ["a", 3], OptionError, "expected a reader"),
    ],
)
def test_an_input_that_cannot_be_opened_raises_and_says_what_was_there(
    files: list[str], value: Any, error: type[Exception], message: str
) -> None:
    touch(*files)
    with pytest.raises(error, match=message):
        read(value)


@pytest.mark.parametrize("value", [Counting(3), "sampler"])
def test_options_that_nothing_takes_raise(value: Any) -> None:
    context = IOContext(options={"epochs": 1}, default_sampler_input=lambda: Counting(3))
    with pytest.raises(OptionError, match="'epochs' have no effect"):
        resolve_input(value, context)


def test_an_unknown_option_of_a_file_reader_raises() -> None:
    Path("a.json").write_text(record(rows_of(0, 3)))
    with pytest.raises(OptionError, match="epoch"):
        read("a.json", epoch=1)


# ---- inputs: mixtures ----


def test_a_dict_of_values_is_a_mixture_with_those_weights(
    opened: list[tuple[str, Any, dict[str, Any]]],
) -> None:
    touch("a.json")
    register_input("mine", lambda context: Counting(None))
    own = Counting(None)
    context = IOContext(
        default_sampler_input=lambda: Counting(None), options={"on_error": "skip", "batch_size": 10}
    )
    reader = resolve_input({"sampler": 0.4, "a.json": 0.3, "mine": 0.2, own: 0.1}, context)
    assert isinstance(reader, MixedInput)
    assert len(reader.sample()) == 10
    assert reader.counts == {"sampler": 4, "a.json": 3, "mine": 2, "source_3": 1}
    assert opened == [("JsonReader", "a.json", {"on_error": "skip"})]
    assert reader.sources["source_3"] is own


def test_pairs_are_a_mixture_too_and_nest(opened: list[tuple[str, Any, dict[str, Any]]]) -> None:
    touch("a.json", "b.json")
    reader = read([(["a.json", "b.json"], 1), ([("a.json", 1), ("b.json", 1)], 2)], epochs=1)
    assert isinstance(reader, MixedInput)
    assert len(reader.sample()) == 200
    assert reader.counts == {"source_0": 67, "source_1": 133}
    assert [(inputs, options) for _, inputs, options in opened] == [
        (["a.json", "b.json"], {"epochs": 1}),
        ("a.json", {"epochs": 1}),
        ("b.json", {"epochs": 1}),
    ]


def test_the_options_of_a_mixture_are_told_from_those_of_its_readers(
    opened: list[tuple[str, Any, dict[str, Any]]],
) -> None:
    touch("a.json")
    reader = read(
        {"a.json": 1}, columns="intersect", end="renormalise", source_column=True, batch_size=4, epochs=1
    )
    assert isinstance(reader, MixedInput)
    assert (reader.columns, reader.end, reader.source_column, reader.batch_size) == (
        "intersect",
        "renormalise",
        True,
        4,
    )
    read({"a.json": 1}, columns=["obs"])
    assert [options for _, _, options in opened] == [{"epochs": 1}, {"columns": ["obs"]}]


def test_reader_options_for_a_mixture_of_readers_alone_raise() -> None:
    with pytest.raises(OptionError, match="'epochs' have no effect"):
        read({Counting(None): 1}, epochs=1)


def test_a_source_that_is_given_twice_raises(opened: list[tuple[str, Any, dict[str, Any]]]) -> None:
    touch("a.json")
    with pytest.raises(OptionError, match=r"'a\.json' is a source of the mixture twice"):
        read([("a.json", 1), ("a.json", 2)])


def test_the_names_of_sources_have_no_passwords_and_stay_different(
    monkeypatch: pytest.MonkeyPatch, opened: list[tuple[str, Any, dict[str, Any]]]
) -> None:
    uris = ["sftp://ada:secret@host/a.json", "https://host/b.json?sig=1", "https://host/b.json?sig=2"]
    monkeypatch.setattr(resolve, "resolve_input", lambda *_, **__: Counting(None))
    with resolve._mixture([(uri, 1) for uri in uris], IOContext(), None) as mixed:
        assert isinstance(mixed, MixedInput)
        assert list(mixed.sources) == ["sftp://ada:***@host/a.json", "https://host/b.json?***", "source_2"]


def test_a_mixture_that_fails_closes_what_it_opened_and_nothing_else() -> None:
    mine, theirs = Counting(None), Counting(None)
    with pytest.raises(DataNotFound):
        read([(lambda context: mine, 1), (theirs, 1), ("./nowhere", 1)])
    assert (mine.closed, theirs.closed) == (1, 0)


# ---- outputs ----


def test_no_output_keeps_nothing() -> None:
    assert isinstance(resolve_output(None, IOContext()), NoopOutput)


def test_a_writer_is_itself_and_functions_and_names_get_the_context() -> None:
    writer = Keeping()
    assert resolve_output(writer, IOContext()) is writer
    assert resolve_output(lambda context: writer, IOContext()) is writer
    assert isinstance(resolve_output(NoopOutput, IOContext()), NoopOutput)
    register_output("mine", lambda context: context.options["writer"])
    assert resolve_output("mine", IOContext(options={"writer": writer})) is writer


def test_an_output_path_is_a_data_set_that_reads_back() -> None:
    with resolve_output("runs/cartpole", IOContext(worker_index=3, num_workers=4)) as writer:
        assert isinstance(writer, ParquetWriter)
        assert writer.writer_id.startswith("w00003-")
        writer.write(rows_of(0, 7))
    with read("runs/cartpole", epochs=1, batch_size=3) as reader:
        assert isinstance(reader, DatasetReader)
        assert_same(concat_samples(list(reader)), rows_of(0, 7))


def test_logdir_is_the_workers_log_folder() -> None:
    with resolve_output("logdir", IOContext(log_dir="logs")) as writer:
        writer.write(rows_of(0, 3))
    assert os.path.exists("logs/_rlio.json")
    with pytest.raises(OptionError, match="log_dir"):
        resolve_output("logdir", IOContext())


def test_a_path_may_contain_any_letters() -> None:
    for name in ("./dataset", "./logdir", "s3-like", "d4rl"):
        with resolve_output(name, IOContext()) as writer:
            writer.write(rows_of(0, 2))
        assert os.path.exists(f"{name}/_rlio.json")


@pytest.mark.parametrize("word", ["dataset", "sampler"])
def test_a_word_of_rllib_that_is_no_output_makes_no_folder(word: str) -> None:
    with pytest.raises(OptionError, match=rf"output='{word}': .*'\./{word}'"):
        resolve_output(word, IOContext())
    with pytest.raises(OptionError, match=word):
        rlio.RolloutWorker("CartPole-v1", rlio.RandomPolicy(), output=word)
    assert not Path(word).exists()
    register_output(word, lambda context: NoopOutput())
    assert isinstance(resolve_output(word, IOContext()), NoopOutput)


@pytest.mark.few(1)
@pytest.mark.parametrize(("word", "what"), [("dataset", "files of Ray Data"), ("logdir", "of an output")])
def test_a_word_of_rllib_that_is_no_input_is_explained(word: str, what: str) -> None:
    with pytest.raises(DataNotFound, match=what):
        read(word)


@pytest.mark.parametrize("value", [3, [], ["a"], {"a": 1}])
def test_an_output_of_no_known_kind_raises(value: Any) -> None:
    with pytest.raises(OptionError, match=r"the output is .*logdir.*a path, or None"):
        resolve_output(value, IOContext())


@pytest.mark.parametrize("value", [None, Keeping()])
def test_output_options_that_nothing_takes_raise(value: Any) -> None:
    with pytest.raises(OptionError, match="'roll' have no effect"):
        resolve_output(value, IOContext(options={"roll": 1}))


def test_an_unknown_option_of_the_writer_raises_and_names_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"no option 'rol'.* roll, compression"):
        resolve_output("out", IOContext(options={"rol": 1}))
    assert not Path("out").exists()


def test_an_output_function_that_gives_a_reader_raises() -> None:
    with pytest.raises(OptionError, match="OutputWriter"):
        resolve_output(lambda context: Counting(3), IOContext())


# ---- the real thing ----


def test_json_lines_are_read_and_mixed_with_a_data_set() -> None:
    Path("old").mkdir()
    Path("old/a.json").write_text(record(SampleBatch(t=[1, 2, 3])) + record(SampleBatch(t=[4, 5])))
    with read("old/*.json", epochs=1) as reader:
        assert isinstance(reader, JsonReader)
        assert [batch["t"].tolist() for batch in reader] == [[1, 2, 3], [4, 5]]
    with ParquetWriter("new") as writer:
        writer.write(SampleBatch(t=[11, 12, 13]))
    with read({"old": 2, "new": 1}, batch_size=3) as mix:
        assert [mix.sample()["t"].tolist() for _ in range(3)] == [[1, 2, 11], [3, 4, 12], [5, 1, 13]]


@pytest.mark.further
def test_resolving_imports_only_what_is_used(tmp_path: Path) -> None:
    code = (
        "import sys, rlio\n"
        "rlio.register_input('mine', lambda context: None)\n"
        "heavy = {'torch', 'h5py', 'pyarrow', 'pyarrow.dataset', 'fsspec', 'gymnasium'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "rlio.resolve.resolve_output(None, rlio.IOContext())\n"
        "assert 'torch' not in sys.modules and 'pyarrow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_the_functions_are_public() -> None:
    assert rlio.read is read
    assert rlio.register_input is register_input
    assert isinstance(NoopOutput(), OutputWriter)


def test_an_open_data_set_is_read_as_its_path_and_shared_out_among_workers() -> None:
    with ParquetWriter("out") as writer:
        writer.write(SampleBatch(t=range(10)))
    data = rlio.open_dataset("out")
    with read(data, batch_size=4, epochs=1) as reader:
        assert [len(batch) for batch in reader] == [4, 4, 2]
    context = IOContext(worker_index=2, num_workers=2, options={"batch_size": 5, "epochs": 1})
    with resolve_input(data, context) as reader:
        assert isinstance(reader, DatasetReader)
        assert reader.options.shard == (1, 2)
    with read([(data, 1), ("out", 1)], batch_size=4) as mix:
        assert len(mix.sample()) == 4
    with pytest.raises(OptionError):
        read(data, batch_size=4, storage_options={})
