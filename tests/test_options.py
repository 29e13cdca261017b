"""Options: unknown ones are answered with the known ones, in both spellings; illegal values are refused."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting import Counting
from stored_batches import fresh_root

import rlio
from rlio.distributed.group.fault_tolerance import FaultTolerance
from rlio.envs.atari import AtariOptions
from rlio.errors import OptionError, UnknownName
from rlio.evaluation.intervals import IntervalOptions
from rlio.log.spool import Spool
from rlio.read_options import ReadOptions
from rlio.readers.async_input import AsyncInput
from rlio.replay import priorities
from rlio.schemas.parquet import Compression
from rlio.schemas.provenance import Provenance
from rlio.serving.policy_server import ServerLimits
from rlio.storage.call_options import split_options
from rlio.storage.filesystem import Retry
from rlio.support.options import checked_keywords, folded, option_names, refuse_unknown

READ = {"batch_size", "epochs", "shuffle", "seed", "shard", "columns", "on_error", "drop_last"}
DATASET = READ | {"cache", "storage_options", "limits", "at", "draw", "filter", "derive"}
DRAWN = {"draw", "policy", "filter", "views", "indexes", "columns"}


def rows() -> rlio.SampleBatch:
    return rlio.SampleBatch(
        obs=np.zeros((8, 2), np.float32),
        actions=np.zeros(8, np.int64),
        rewards=np.arange(8, dtype=np.float32),
        terminateds=np.arange(8) == 7,
        truncateds=np.zeros(8, bool),
        eps_id=np.ones(8, np.int64),
        t=np.arange(8),
    )


@pytest.fixture
def root(tmp_path: Path) -> str:
    with rlio.ParquetWriter(tmp_path / "data") as writer:
        writer.write(rows())
    return str(tmp_path / "data")


@pytest.fixture
def store() -> Iterator[rlio.ReplayStore]:
    with rlio.ReplayStore(capacity=100) as ring:
        ring.append(rows())
        yield ring


def test_an_unknown_option_is_answered_with_every_option_that_is_valid_there(
    root: str, store: rlio.ReplayStore, tmp_path: Path
) -> None:
    lines = tmp_path / "old.json"
    lines.write_text("{}\n")
    asked: list[tuple[Callable[[], object], set[str], str]] = [
        (lambda: rlio.DatasetReader(root, drawn=None), DATASET, "draw"),  # type: ignore[call-arg]
        (lambda: rlio.read(root, storage_option={}), DATASET, "storage_options"),
        (lambda: rlio.read({root: 1.0}, cach="memory"), DATASET, "cache"),
        (lambda: rlio.read(str(lines), batchsize=3), READ | {"storage_options"}, "batch_size"),
        (lambda: rlio.D4RLReader("x.hdf5", epoch=1), READ | {"storage_options"}, "epochs"),  # type: ignore[call-arg]
        (lambda: rlio.ForeignParquetReader("x.parquet", limit=1), READ | {"limits"}, "limits"),  # type: ignore[call-arg]
        (lambda: store.uniform(draws=None), DRAWN | {"batch_size", "seed"}, "draw"),  # type: ignore[call-arg]
        (lambda: store.epochs(shufle=True), DRAWN | {"batch_size", "shuffle"}, "shuffle"),  # type: ignore[call-arg]
        (lambda: store.prioritised(aplha=0.6), DRAWN | {"alpha", "normalise"}, "alpha"),  # type: ignore[call-arg]
        (
            lambda: rlio.FollowingReplay(root, capacity=10, polcy=3),  # type: ignore[call-arg]
            DRAWN | {"capacity", "ratio", "timeout"},
            "policy",
        ),
        (lambda: rlio.RolloutConfig(num_env=8), {"num_envs", "explore", "clip_rewards"}, "num_envs"),  # type: ignore[call-arg]
        (lambda: rlio.ParquetWriter(tmp_path / "out", rol=1), {"roll", "compression", "spool"}, "roll"),  # type: ignore[call-arg]
        (lambda: rlio.JsonWriter(tmp_path / "out", rol=1), {"roll", "compression"}, "roll"),  # type: ignore[call-arg]
        (
            lambda: rlio.RolloutWorker("CartPole-v1", rlio.RandomPolicy(), outputs="x"),  # type: ignore[call-arg]
            {"input", "output", "rollout", "input_options", "seed"},
            "output",
        ),
        (
            lambda: rlio.RolloutWorker(
                "CartPole-v1", rlio.RandomPolicy(), output=str(tmp_path / "out"), output_options={"rol": 1}
            ),
            {"roll", "compression", "spool"},
            "roll",
        ),
    ]
    for ask, known, meant in asked:
        with pytest.raises(UnknownName) as found:
            ask()
        text = str(found.value)
        words = set(text.replace(",", " ").split())
        assert known <= words, (known - words, text)
        assert f"{meant!r}?" in text, text
    assert not (tmp_path / "out").exists()


# Each former keyword, and some of other libraries -> a value, and what is written instead.
FORMER: dict[str, tuple[Any, str]] = {
    "n_step": (3, "draw=rlio.NStep(3, gamma=0.99)"),
    "gamma": (0.9, "derive=['mc_return(0.99)']"),
    "sequence_length": (20, "draw=rlio.Sequences(20)"),
    "burn_in": (5, "draw=rlio.Sequences(length, burn_in=...)"),
    "overlap": (5, "draw=rlio.Sequences(length, overlap=...)"),
    "starts": ("all", "draw=rlio.Sequences(length, starts=...)"),
    "padding": ("left", "draw=rlio.Sequences(length, padding=...)"),
    "layout": ("time", "draw=rlio.Sequences(length, layout=...)"),
    "episodes": ([1, 2], "draw=rlio.WholeEpisodes(), or to choose some filter="),
    "num_workers": (4, "rlio.torch.ReplayDataset(...).loader(num_workers=...)"),
    "world_size": (4, "shard=(rank, world)"),
    "device": ("cuda", "rlio.torch.prefetch(reader, device=...)"),
}


def test_a_keyword_that_draw_replaced_is_answered_with_what_to_write(
    root: str, store: rlio.ReplayStore, tmp_path: Path
) -> None:
    lines = tmp_path / "old.json"
    lines.write_text("{}\n")
    rlio.convert(root, tmp_path / "own.npz", to="npz")
    takers: dict[str, Callable[..., object]] = {
        "DatasetReader": lambda **options: rlio.DatasetReader(root, **options),
        "read": lambda **options: rlio.read(root, **options),
        "a mixture": lambda **options: rlio.read({root: 1.0}, **options),
        "episodes of a format": lambda **options: rlio.read(tmp_path / "own.npz", **options),
        "JsonReader": lambda **options: rlio.JsonReader(lines, **options),
        "uniform": store.uniform,
        "epochs": store.epochs,
        "prioritised": store.prioritised,
        "FollowingReplay": lambda **options: rlio.FollowingReplay(root, capacity=9, **options),
        "ReplayDataset": lambda **options: rlio.torch.ReplayDataset(root, batch_size=4, **options),
        "a worker": lambda **options: rlio.RolloutWorker(
            "CartPole-v1", rlio.RandomPolicy(), input=root, input_options=options
        ),
    }
    for where, taker in takers.items():
        for name, (value, instead) in FORMER.items():
            for spelled in (name, f"{name}_"):  # Also where it is misspelled.
                with pytest.raises(UnknownName) as found:
                    taker(**{spelled: value})
                assert instead in str(found.value), (where, name, str(found.value))


def test_a_dict_in_place_of_an_object_is_answered_with_what_takes_it(root: str) -> None:
    with pytest.raises(OptionError, match=r"write mapping=Mapping\(\.\.\.\)"):
        rlio.read(root, mapping={"obs": ["x"]})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"write mapping=Mapping\(\*\*mapping\)"):
        rlio.read(root, mapping={"columns": {"obs": ["x"]}, "episode": "e"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("obs", "columns={'obs': ...}"),
        ("done", "terminated="),
        ("new_obs", "next_obs="),
        ("timeout", "truncated="),
    ],
)
def test_a_column_in_place_of_a_field_of_a_mapping_is_answered_with_the_field(
    name: str, instead: str
) -> None:
    with pytest.raises(UnknownName) as found:
        rlio.Mapping({"obs": "x"}, **{name: "x"})
    assert f"{instead}. It takes" in str(found.value)


def test_the_values_of_draw_are_frozen_and_show_their_spelling() -> None:
    values = (rlio.NStep(3, gamma=0.9), rlio.Sequences(20, burn_in=5), rlio.WholeEpisodes())
    for value in values:
        again = pickle.loads(pickle.dumps(value))
        assert again == value == eval(repr(value), {"__builtins__": {}}, kinds())
        assert hash(again) == hash(value)
        with pytest.raises((AttributeError, TypeError)):
            value.n = 4  # type: ignore[misc, union-attr]  # That is the point.
    assert repr(rlio.NStep()) == "NStep(n=1, gamma=0.99)"
    for make in (lambda: rlio.NStep(3, gama=1), lambda: rlio.Sequences(3, burnin=1)):  # type: ignore[call-arg]
        with pytest.raises(UnknownName, match=r"did you mean '(gamma|burn_in)'"):
            make()


def kinds() -> dict[str, Any]:
    return {"NStep": rlio.NStep, "Sequences": rlio.Sequences, "WholeEpisodes": rlio.WholeEpisodes}


def test_an_option_of_a_registered_reader_that_it_does_not_take_is_answered_with_its_options() -> None:
    class Constant(rlio.InputReader):
        def __init__(self, *, height: float = 1.0) -> None:
            self.height = height

        def _next(self) -> rlio.SampleBatch:
            return rlio.SampleBatch(rewards=[self.height])

    rlio.register_input("a_constant_with_options", Constant)
    with pytest.raises(UnknownName) as found:
        rlio.read("a_constant_with_options", heights=2.0)
    assert "'height'?" in str(found.value)
    assert rlio.read("a_constant_with_options", height=2.0).sample()["rewards"].tolist() == [2.0]


def test_british_and_american_spellings_both_work_where_users_type(store: rlio.ReplayStore) -> None:
    assert rlio.policies.BehaviorCloning is rlio.policies.BehaviourCloning  # type: ignore[attr-defined]
    for draw in (store.prioritised, store.prioritized):
        for spelling in ("normalise", "normalize"):
            batch = draw(batch_size=4, seed=0, **{spelling: "batch"}).sample()
            assert batch["weights"].max() == 1.0
    for spelling in ("normalize_actions", "normalise_actions"):
        assert rlio.RolloutConfig(**{spelling: False}).normalize_actions is False
    mixed = rlio.MixedInput([(store.uniform(), 1)], batch_size=4, end="renormalize")
    assert mixed.end == "renormalise"
    for kind in (priorities.Prioritised, priorities.Prioritized):
        assert kind(normalize="batch") == kind(normalise="batch")  # type: ignore[call-arg]
    assert rlio.RolloutConfig(vectorise_mode="async").vectorize_mode == "async"  # type: ignore[call-arg]
    metrics = rlio.RolloutWorker("CartPole-v1", rlio.RandomPolicy(), seed=0).get_metrics()
    assert metrics.summarize() == metrics.summarise()


def test_two_spellings_of_one_option_at_once_are_refused() -> None:
    with pytest.raises(OptionError):
        rlio.RolloutConfig(normalize_actions=True, normalise_actions=False)  # type: ignore[call-arg]


STEMS = ("prioritis", "normalis", "standardis", "summaris", "synchronis", "vectoris", "optimis", "initialis")


def either(name: str) -> str:
    """``name`` in the other spelling; itself if there is one spelling only."""
    pairs = [("viour", "vior"), ("colour", "color"), ("grey", "gray")]
    pairs += [(stem, f"{stem[:-1]}z") for stem in STEMS]
    for british, american in pairs:
        for old, new in ((british, american), (american, british)):
            if old in name:
                assert folded(name) == folded(name.replace(old, new))
                return name.replace(old, new)
    return name


# What torch and RLlib call it, in either country.
BORROWED = {"optimizer", "v_behavior"}


def test_every_public_option_with_two_spellings_takes_both() -> None:
    packages = (rlio.policies, rlio.evaluation, rlio.sampling, rlio.connectors, rlio.envs, rlio.serving)
    homes = [rlio, *packages, rlio.distributed, rlio.maintenance, rlio.torch]
    for home, name in [(each, name) for each in homes for name in each.__all__]:
        found = getattr(home, name)
        assert hasattr(home, either(name)), f"{name} has no other spelling"
        if not inspect.isclass(found):
            continue
        methods = [method for key, method in vars(found).items() if key == "__init__" or key[0] != "_"]
        for method in filter(inspect.isfunction, methods):
            for option in set(inspect.signature(method).parameters) - BORROWED:
                if either(option) != option:
                    assert hasattr(method, "__wrapped__"), f"{name}.{method.__name__}({option}=...)"
        for key in vars(found):
            if not key.startswith("_") and inspect.isfunction(vars(found)[key]) and either(key) != key:
                assert hasattr(found, either(key)), f"{name}.{key} has no other spelling"


def test_what_takes_checked_keywords_keeps_its_signature_and_can_be_pickled() -> None:
    names = list(inspect.signature(rlio.RolloutConfig).parameters)
    assert "normalize_actions" in names
    assert "normalise_actions" not in names
    config = rlio.RolloutConfig(normalise_actions=False)  # type: ignore[call-arg]
    assert pickle.loads(pickle.dumps(config)) == config


def test_options_are_told_from_a_signature_and_from_its_typed_keywords() -> None:
    assert set(option_names(rlio.DatasetReader) or ()) >= DATASET
    assert option_names(lambda value, *, one, two=2: None) == ("value", "one", "two")
    assert option_names(lambda **anything: None) is None

    @checked_keywords
    def paint(*, colour: str = "grey") -> str:
        return colour

    assert paint(color="red") == "red"  # type: ignore[call-arg]
    with pytest.raises(UnknownName):
        paint(flavour="sweet")  # type: ignore[call-arg]
    refuse_unknown({"a": 1}, ("a", "b"), of="this")


# ---- numbers ----

# What makes an object with a whole number -> a number that it takes, and the attribute that has it then.
COUNTS: dict[str, tuple[Callable[[Any], Any], int, str | None]] = {
    "Roll.max_rows": (lambda n: rlio.Roll(max_rows=n), 100, "max_rows"),
    "Roll.max_bytes": (lambda n: rlio.Roll(max_bytes=n), 1 << 20, "max_bytes"),
    "Spool.max_bytes": (lambda n: Spool(max_bytes=n), 1 << 20, "max_bytes"),
    "Compression.level": (lambda n: Compression("zstd", n), 3, "level"),
    "Pace.ahead": (lambda n: rlio.Pace(ahead=n), 3, "ahead"),
    "SamplesPerInsert.error_buffer": (lambda n: rlio.SamplesPerInsert(error_buffer=n), 3, "error_buffer"),
    "SamplesPerInsert.min_size": (lambda n: rlio.SamplesPerInsert(min_size=n), 3, "min_size"),
    "Markers.every_rows": (lambda n: rlio.Markers("me", every_rows=n), 3, "every_rows"),
    "Limits.columns": (lambda n: rlio.Limits(columns=n), 3, "columns"),
    "Retry.attempts": (lambda n: Retry(attempts=n), 3, "attempts"),
    "batch_size": (lambda n: ReadOptions(batch_size=n), 3, "batch_size"),
    "epochs": (lambda n: ReadOptions(epochs=n), 3, "epochs"),
    "seed": (lambda n: ReadOptions(seed=n), 3, "seed"),
    "shard": (lambda n: ReadOptions(shard=(0, n)), 3, None),
    "ShuffledInput.n": (lambda n: rlio.ShuffledInput(Counting(3), n, seed=1), 3, "n"),
    "ShuffledInput.seed": (lambda n: rlio.ShuffledInput(Counting(3), 2, seed=n), 3, "seed"),
    "MixedInput.batch_size": (lambda n: rlio.MixedInput({"a": Counting(3)}, batch_size=n), 3, "batch_size"),
    "AsyncInput.queue_size": (lambda n: AsyncInput(Counting(3), queue_size=n).close(), 3, None),
    "capacity": (lambda n: rlio.ReplayStore(n).close(), 30, None),
    "frames": (lambda n: rlio.ReplayStore(30, frames=n).close(), 30, None),
    "Sequences.length": (lambda n: rlio.Sequences(n), 3, "length"),
    "Sequences.burn_in": (lambda n: rlio.Sequences(9, burn_in=n), 3, "burn_in"),
    "Sequences.overlap": (lambda n: rlio.Sequences(9, overlap=n), 3, "overlap"),
    "NStep.n": (lambda n: rlio.NStep(n), 3, "n"),
    "Provenance.seed": (lambda n: Provenance(seed=n), 3, "seed"),
    "worker_index": (lambda n: rlio.ParquetWriter(fresh_root(), worker_index=n).close(), 3, None),
    "PolicyMap.capacity": (lambda n: rlio.policies.PolicyMap(capacity=n), 3, "capacity"),
    "FrameStack.frames": (lambda n: rlio.connectors.FrameStack(n), 3, "frames"),
    "AtariOptions.frame_skip": (lambda n: AtariOptions(frame_skip=n), 3, "frame_skip"),
    "ServerLimits.connections": (lambda n: ServerLimits(connections=n), 3, "connections"),
    "IntervalOptions.resamples": (lambda n: IntervalOptions(resamples=n), 300, "resamples"),
    "FittedQ.iterations": (lambda n: rlio.evaluation.FittedQ(iterations=n), 3, "iterations"),
    "FaultTolerance.max_restarts": (lambda n: FaultTolerance(max_restarts=n), 3, "max_restarts"),
}
NUMBERS: dict[str, tuple[Callable[[Any], Any], float, str | None]] = {
    "Roll.max_seconds": (lambda x: rlio.Roll(max_seconds=x), 0.5, "max_seconds"),
    "Spool.sync_interval": (lambda x: Spool(sync_interval=x), 0.5, "sync_interval"),
    "Spool.block_seconds": (lambda x: Spool(block_seconds=x), 0.5, "block_seconds"),
    "Spool.publish_seconds": (lambda x: Spool(publish_seconds=x), 0.5, "publish_seconds"),
    "Pace.stale_seconds": (lambda x: rlio.Pace(stale_seconds=x), 0.5, "stale_seconds"),
    "Pace.poll_seconds": (lambda x: rlio.Pace(poll_seconds=x), 0.5, "poll_seconds"),
    "SamplesPerInsert.max": (lambda x: rlio.SamplesPerInsert(max=x), 0.5, "max"),
    "SamplesPerInsert.min": (lambda x: rlio.SamplesPerInsert(min=x), 0.5, "min"),
    "Markers.idle_seconds": (lambda x: rlio.Markers("me", idle_seconds=x), 0.5, "idle_seconds"),
    "Retry.first_delay": (lambda x: Retry(first_delay=x), 0.5, "first_delay"),
    "rlio_timeout_seconds": (lambda x: split_options({"rlio_timeout": x}), 0.5, None),
    "NStep.gamma": (lambda x: rlio.NStep(3, gamma=x), 0.5, "gamma"),
    "GAE.lambda_": (lambda x: rlio.policies.GAE(lambda_=x), 0.5, "lambda_"),
    "alpha": (lambda x: priorities.Prioritised(alpha=x), 0.5, "alpha"),
    "beta": (lambda x: priorities.Prioritised(beta=x), 0.5, "beta"),
    "MeanStdFilter.clip": (lambda x: rlio.connectors.MeanStdFilter(clip=x), 0.5, "clip"),
    "AtariOptions.sticky": (lambda x: AtariOptions(sticky=x), 0.5, "sticky"),
    "ServerLimits.head_seconds": (lambda x: ServerLimits(head_seconds=x), 0.5, "head_seconds"),
    "IntervalOptions.confidence": (lambda x: IntervalOptions(confidence=x), 0.5, "confidence"),
    "FittedQ.tau": (lambda x: rlio.evaluation.FittedQ(tau=x), 0.5, "tau"),
    "FaultTolerance.start_timeout_s": (lambda x: FaultTolerance(start_timeout_s=x), 0.5, "start_timeout_s"),
    "learning_rate": (lambda x: rlio.TorchPolicy(learning_rate=x), 0.5, None),
    "clip_param": (lambda x: rlio.policies.ActorCritic(clip_param=x), 0.5, None),
}  # fmt: skip
NEVER: list[Any] = [
    True,
    np.True_,
    float("nan"),
    float("inf"),
    -float("inf"),
    np.float32("nan"),
    "3",
    1j,
    [1],
]


@pytest.mark.parametrize("name", COUNTS)
def test_a_whole_number_is_taken_from_numpy_and_nothing_else_is(name: str) -> None:
    make, good, attribute = COUNTS[name]
    for value in (good, np.int64(good), np.uint32(good)):
        made = make(value)
        if attribute is not None:
            assert getattr(made, attribute) == good
            assert type(getattr(made, attribute)) is int
    negative = [-1] if name not in ("Compression.level", "Provenance.seed") else []
    for wrong in [*NEVER, *negative, 3.0, 2.5, np.float64(3)]:
        with pytest.raises(OptionError, match=r"=.*: expected "):
            make(wrong)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_taken_from_numpy_and_nothing_else_is(name: str) -> None:
    make, good, attribute = NUMBERS[name]
    for value in (good, np.float32(good), np.float64(good), Fraction(1, 2)):
        made = make(value)
        if attribute is not None:
            assert getattr(made, attribute) == good
            assert type(getattr(made, attribute)) is float
    for wrong in [*NEVER, -1.0, 10**400, *([1e300] if "second" in name else [])]:
        with pytest.raises(OptionError, match=r"=.*: expected "):
            make(wrong)


def test_a_choice_and_a_flag_are_told_what_there_is() -> None:
    with pytest.raises(OptionError, match=r"cache='ram': expected 'auto', 'memory', 'disk' or 'none'"):
        rlio.DatasetReader("nowhere", cache="ram")  # type: ignore[arg-type]  # That is the point.
    for wrong in (None, 1, np.array(["raise"]), ["raise"]):
        with pytest.raises(OptionError, match=r"on_error=.*: expected 'raise' or 'skip'"):
            ReadOptions(on_error=wrong)  # type: ignore[arg-type]  # That is the point.
    assert ReadOptions(shuffle=np.True_).shuffle is True  # type: ignore[arg-type]  # Also NumPy's.
    for wrong in (None, 1, "yes"):
        with pytest.raises(OptionError, match=r"shuffle=.*: expected True or False"):
            ReadOptions(shuffle=wrong)  # type: ignore[arg-type]  # That is the point.


@pytest.mark.parametrize("make", [rlio.ParquetWriter, rlio.JsonWriter])
def test_a_limit_of_rows_from_numpy_does_not_end_a_writer(make: Any, tmp_path: Path) -> None:
    """It cannot be written into the header of a log, which is JSON."""
    roll = rlio.Roll(max_rows=np.int64(3), max_bytes=np.int64(1 << 20), max_seconds=np.float32(30))
    with make(tmp_path / "root", roll=roll, worker_index=np.int64(1)) as writer:
        for number in range(2):
            writer.write(rlio.SampleBatch(rows(), eps_id=np.full(8, number)))
    assert len(rlio.open_dataset(tmp_path / "root")) == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"roll": {"max_rows": 3}}, r"roll=.*Roll\(\*\*roll\)"),
        ({"provenance": {"seed": 1}}, "provenance="),
        ({"spool": 3}, "spool=3: expected"),
        ({"sync": "often"}, "sync='often': expected 'interval', 'always' or 'never'"),
        ({"sync": True}, "sync=True: expected"), ({"writer_id": 7}, "writer_id"),
        ({"writer_id": "../x"}, "writer_id"), ({"worker_index": -1}, "worker_index=-1"),
        ({"compression": 3}, "compression=3"), ({"compression": "zip"}, "zip"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("make", [rlio.ParquetWriter, rlio.JsonWriter])
def test_an_illegal_option_of_a_writer_is_refused_when_it_is_opened(
    make: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        make(tmp_path / "root", **options)
    assert not (tmp_path / "root" / "data").exists()


def test_columns_to_compress_are_names_and_a_pace_is_a_pace(tmp_path: Path) -> None:
    for wrong in ("obs", 3, [1], [None]):
        with pytest.raises(OptionError, match="compress_columns="):
            rlio.JsonWriter(tmp_path, compress_columns=wrong)  # type: ignore[arg-type]  # That is the point.
    with rlio.ParquetWriter(tmp_path) as writer, pytest.raises(OptionError, match="pace="):
        rlio.PacedWriter(writer, pace={"ahead": 3})  # type: ignore[arg-type]  # That is the point.


def test_shards_for_which_there_is_no_memory_are_refused_before_a_row_is_taken(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"Roll.max_bytes=\d+: .*memory"):
        rlio.ParquetWriter(tmp_path, roll=rlio.Roll(max_bytes=1 << 60))
