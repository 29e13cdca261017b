"""Unknown options are answered with the known ones; names work in British and in American spelling."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import rlio
from rlio.errors import OptionError, UnknownName
from rlio.replay import priorities
from rlio.support.options import checked_keywords, folded, option_names, refuse_unknown

READ = {"batch_size", "epochs", "shuffle", "seed", "shard", "columns", "on_error", "drop_last"}
DATASET = READ | {"cache", "storage_options", "limits", "at", "follow", "n_step", "filter", "sequence_length"}
DRAWN = {"n_step", "gamma", "sequence_length", "filter", "views", "columns"}


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
        (lambda: rlio.DatasetReader(root, n_stepp=3), DATASET, "n_step"),  # type: ignore[call-arg]
        (lambda: rlio.read(root, storage_option={}), DATASET, "storage_options"),
        (lambda: rlio.read({root: 1.0}, cach="memory"), DATASET, "cache"),
        (lambda: rlio.read(str(lines), batchsize=3), READ | {"storage_options"}, "batch_size"),
        (lambda: rlio.D4RLReader("x.hdf5", epoch=1), READ | {"storage_options"}, "epochs"),  # type: ignore[call-arg]
        (lambda: rlio.ForeignParquetReader("x.parquet", limit=1), READ | {"limits"}, "limits"),  # type: ignore[call-arg]
        (lambda: store.uniform(nstep=3), DRAWN | {"batch_size", "seed"}, "n_step"),  # type: ignore[call-arg]
        (lambda: store.epochs(shufle=True), DRAWN | {"batch_size", "shuffle"}, "shuffle"),  # type: ignore[call-arg]
        (lambda: store.prioritised(aplha=0.6), DRAWN | {"alpha", "normalise"}, "alpha"),  # type: ignore[call-arg]
        (
            lambda: rlio.FollowingReplay(root, capacity=10, n_stepp=3),  # type: ignore[call-arg]
            DRAWN | {"capacity", "ratio", "timeout"},
            "n_step",
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
