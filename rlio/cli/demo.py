"""`rlio demo`: record, replay and mix, end to end, in a few minutes on two cores.

Trains a policy briefly on CartPole-v1 and records it, trains a new policy from the record alone, then tunes
that one on a mix of live and logged steps. Evaluates all of them on seeds that none of them has seen.
"""

from __future__ import annotations

import io
import logging
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlio.cli.options import StorageOptions, parse_storage_options
from rlio.cli.tables import missing_plots, new_plot, print_table, progress_bar
from rlio.errors import OptionError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rlio.policies.dqn import DQN
    from rlio.support.progress import Progress

__all__ = ["DemoOptions", "DemoReport", "Row", "demo", "run_demo"]

logger: logging.Logger = logging.getLogger("rlio")

ENV = "CartPole-v1"
_LEARNED = ("obs", "new_obs", "actions", "rewards", "terminateds")
# Each part has its own seed, so none repeats another's episodes.
_SEEDS = {"behaviour": 1, "recording": 2, "offline": 3, "tuning": 4, "evaluation": 5}

_QUICK: dict[str, Any] = {
    "train_steps": 1_600,
    "record_steps": 5_000,
    "offline_updates": 200,
    "tuning_updates": 20,
    "episodes": 20,
}


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Length of each part of the demo. The defaults take under three minutes on two cores.

    Attributes:
        out: Folder or fsspec URL; each run creates a new numbered folder below it.
        seed: Seed of all random numbers.
        train_steps: Live steps of the policy that is recorded.
        record_steps: Steps recorded.
        offline_updates: Updates of the policy that learns from the record alone.
        tuning_updates: Updates on the mix that follow; half of each batch is live steps.
        episodes: Episodes of each evaluation.
        storage_options: Options for fsspec.
    """

    out: str = "runs/demo"
    seed: int = 0
    train_steps: int = 8_000
    record_steps: int = 50_000
    offline_updates: int = 4_000
    tuning_updates: int = 400
    episodes: int = 100
    # May hold secrets.
    storage_options: dict[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Row:
    """One policy of the table.

    Attributes:
        policy: Its name.
        live, logged: Number of steps that it learned from.
        mean, standard_error: Of its returns in evaluation.
        steps_per_s: Steps sampled or read per second of its training; None: not trained.
    """

    policy: str
    live: int
    logged: int
    mean: float
    standard_error: float
    steps_per_s: float | None


@dataclass
class DemoReport:
    """Results of the demo.

    Attributes:
        root: The data set.
        uri: The data set as shown to users: absolute, without secrets.
        plot: URI of the plot; None if matplotlib is not installed.
        rows: The table.
        recorded_steps: Steps in the data set.
        recorded_steps_per_s: Speed of recording, sampling included.
        bytes_per_step: Size in the data set.
        raw_bytes_per_step: Size of the same columns in memory.
        returns: Name -> returns of the evaluation episodes.
    """

    root: str = ""
    uri: str = ""
    plot: str | None = None
    rows: list[Row] = field(default_factory=list)
    recorded_steps: int = 0
    recorded_steps_per_s: float = 0.0
    bytes_per_step: float = 0.0
    raw_bytes_per_step: float = 0.0
    returns: dict[str, NDArray[np.float64]] = field(default_factory=dict)


def run_demo(options: DemoOptions, *, progress: Progress | None = None) -> DemoReport:
    """Run the demo.

    Raises:
        OptionError: An option is illegal.
    """
    from rlio.catalog.commit import put_header
    from rlio.policies.random_policy import RandomPolicy
    from rlio.storage.filesystem import Storage
    from rlio.support.progress import silent

    progress = progress or silent
    why_no_plot = missing_plots()
    if why_no_plot is not None:
        logger.warning("the demo will have no plot: %s", why_no_plot)
    report = DemoReport()
    root = _fresh_folder(options)
    report.root = f"{root}/cartpole"
    # Fails early if the store is not writable.
    put_header(Storage.open(report.root, storage_options=options.storage_options))
    _evaluate(report, options, "random", RandomPolicy(), live=0, logged=0, speed=None)
    behaviour = _train_live(report, options, progress)
    _record(report, options, behaviour, progress)
    policy = _train_offline(report, options, progress)
    _tune(report, options, policy, progress)
    storage = Storage.open(root, storage_options=options.storage_options)
    report.uri = storage.uri_of("cartpole")
    if why_no_plot is None:
        storage.put("returns.png", _plot(report))
        report.plot = storage.uri_of("returns.png")
    return report


def _train_live(report: DemoReport, options: DemoOptions, progress: Progress) -> DQN:
    """Train a policy online, from a small memory of its own steps."""
    from rlio.policies.dqn import DQN
    from rlio.replay.store import ReplayStore
    from rlio.sampling.config import RolloutConfig
    from rlio.worker import RolloutWorker

    policy = DQN(epsilon_timesteps=options.train_steps // 2, final_epsilon=0.1)
    memory = ReplayStore(options.train_steps)
    drawn = memory.uniform(batch_size=128, seed=options.seed, columns=list(_LEARNED))
    added = 0
    start = time.perf_counter()
    with (
        RolloutWorker(
            ENV,
            policy,
            rollout=RolloutConfig(num_envs=8, rollout_fragment_length=8),
            seed=_seed(options, "behaviour"),
        ) as worker,
        progress("train live", options.train_steps) as advance,
    ):
        while added < options.train_steps:
            batch = worker.sample()
            memory.append(batch)
            added += len(batch)
            advance(len(batch))
            if added >= 1_000:
                for _ in range(len(batch) // 4):
                    policy.learn_on_batch(drawn.sample())
    speed = added / (time.perf_counter() - start)
    _evaluate(report, options, "behaviour", policy, live=added, logged=0, speed=speed)
    return policy


def _record(report: DemoReport, options: DemoOptions, policy: DQN, progress: Progress) -> None:
    """Record the policy, exploration included, as Parquet."""
    from rlio.sampling.config import RolloutConfig
    from rlio.worker import RolloutWorker
    from rlio.writers.parquet_writer import ParquetWriter

    num_envs, fragment = 10, 100
    # A fixed id makes the same seed give the same files; your own data sets omit it.
    writer = ParquetWriter(report.root, writer_id="w00000-00000000", storage_options=options.storage_options)
    raw = 0
    start = time.perf_counter()
    with (
        writer,
        RolloutWorker(
            ENV,
            policy,
            output=writer,
            rollout=RolloutConfig(num_envs=num_envs, rollout_fragment_length=fragment),
            seed=_seed(options, "recording"),
        ) as worker,
        progress("record", options.record_steps) as advance,
    ):
        while report.recorded_steps < options.record_steps:
            batch = worker.sample()
            raw += batch.size_bytes()
            report.recorded_steps += len(batch)
            advance(len(batch))
    report.recorded_steps_per_s = report.recorded_steps / (time.perf_counter() - start)
    report.bytes_per_step = writer.bytes_published / report.recorded_steps
    report.raw_bytes_per_step = raw / report.recorded_steps


def _train_offline(report: DemoReport, options: DemoOptions, progress: Progress) -> DQN:
    """Train a new policy from the data set alone."""
    import gymnasium as gym

    from rlio.policies.dqn import DQN
    from rlio.readers.dataset_reader import DatasetReader

    policy = DQN(initial_epsilon=0.05, final_epsilon=0.05)
    with gym.make(ENV) as env:
        policy.bind(env.observation_space, env.action_space, seed=_seed(options, "offline"))
    logged = 0
    start = time.perf_counter()
    with (
        DatasetReader(
            report.root,
            batch_size=256,
            shuffle=True,
            seed=_seed(options, "offline"),
            columns=list(_LEARNED),
            storage_options=options.storage_options,
        ) as reader,
        progress("train offline", options.offline_updates) as advance,
    ):
        for _ in range(options.offline_updates):
            batch = reader.sample()
            policy.learn_on_batch(batch)
            logged += batch.agent_steps()
            advance(1)
    speed = logged / (time.perf_counter() - start)
    _evaluate(report, options, "offline", policy, live=0, logged=logged, speed=speed)
    return policy


def _tune(report: DemoReport, options: DemoOptions, policy: DQN, progress: Progress) -> None:
    """Continue training the offline policy with batches that are half live and half logged."""
    from rlio.sampling.config import RolloutConfig
    from rlio.worker import RolloutWorker

    before = report.rows[-1].logged
    size = 256
    start = time.perf_counter()
    with (
        RolloutWorker(
            ENV,
            policy,
            input={"sampler": 0.5, report.root: 0.5},
            input_options={
                "batch_size": size,
                "shuffle": True,
                "columns": "intersect",
                "storage_options": options.storage_options,
            },
            rollout=RolloutConfig(num_envs=8, rollout_fragment_length=16),
            seed=_seed(options, "tuning"),
        ) as worker,
        progress("train on the mix", options.tuning_updates) as advance,
    ):
        for _ in range(options.tuning_updates):
            policy.learn_on_batch(worker.sample())
            advance(1)
    steps = options.tuning_updates * size
    speed = steps / (time.perf_counter() - start)
    _evaluate(report, options, "mixed", policy, live=steps // 2, logged=before + steps // 2, speed=speed)


def _evaluate(
    report: DemoReport,
    options: DemoOptions,
    name: str,
    policy: Any,
    *,
    live: int,
    logged: int,
    speed: float | None,
) -> None:
    """Add a row: the returns of whole episodes on new seeds, without exploration."""
    from rlio.sampling.evaluate import evaluate

    result = evaluate(policy, ENV, episodes=options.episodes, seed=_seed(options, "evaluation"), num_envs=20)
    report.returns[name] = result.returns
    report.rows.append(Row(name, live, logged, result.mean, result.standard_error, speed))


def _seed(options: DemoOptions, part: str) -> int:
    """The seed of one part."""
    import numpy as np

    return int(np.random.SeedSequence([options.seed, _SEEDS[part]]).generate_state(1)[0])


def _fresh_folder(options: DemoOptions) -> str:
    """Return the first numbered folder below ``out`` that is empty."""
    from rlio.storage.filesystem import Storage

    out = options.out
    for number in range(1, 10_000):
        root = f"{out.rstrip('/')}/{number:03d}"
        if not Storage.open(root, storage_options=options.storage_options).exists():
            return root
    raise OptionError(f"out={out!r} already holds 9,999 runs: pass another folder")


def _plot(report: DemoReport) -> bytes:
    """Plot the returns of every policy as a PNG."""
    import numpy as np

    figure, axes = new_plot(width=7)
    names = list(report.returns)
    rng = np.random.default_rng(0)  # Only for horizontal jitter.
    for place, name in enumerate(names):
        returns = report.returns[name]
        axes.scatter(place + rng.uniform(-0.2, 0.2, len(returns)), returns, s=8, alpha=0.4)
        spread = returns.std(ddof=1) / np.sqrt(len(returns)) if len(returns) > 1 else 0.0
        axes.errorbar(place, returns.mean(), yerr=spread, fmt="o", color="black", capsize=4)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("return of an episode")
    axes.set_title(f"{ENV}: episodes on fresh seeds, mean and standard error")
    axes.set_ylim(bottom=0)
    buffer = io.BytesIO()
    # Omits date and software version, so the same returns give the same bytes.
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


def demo(
    out: Annotated[
        str, typer.Option(help="Folder or fsspec URL; each run creates a new folder there.")
    ] = "runs/demo",
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    quick: Annotated[
        bool, typer.Option(help="A tenth of the work: shows each step, but learns little.")
    ] = False,
    storage_options: StorageOptions = None,
) -> None:
    """Train briefly on CartPole, record 50,000 steps, train from them alone, then tune on a live mix."""
    import torch

    # One thread is faster for such small networks; the other core decodes and encodes.
    torch.set_num_threads(1)
    options = DemoOptions(out=out, seed=seed, storage_options=parse_storage_options(storage_options))
    if quick:
        options = replace(options, **_QUICK)
    _show(
        run_demo(options, progress=partial(progress_bar, disable=False, leave=True, delay=0, mininterval=0.5))
    )


def _show(report: DemoReport) -> None:
    """Print the table and the paths of the results."""
    from rich.console import Console

    rows = [
        [
            row.policy,
            f"{row.live:,}",
            f"{row.logged:,}",
            f"{row.mean:.1f} ± {row.standard_error:.1f}",
            "" if row.steps_per_s is None else f"{row.steps_per_s:,.0f}",
            "" if row.policy == "random" else f"{report.bytes_per_step:.1f}",
        ]
        for row in report.rows
    ]
    print_table(
        f"{ENV}, {len(report.returns['random'])} episodes on fresh seeds",
        ["policy", "live steps", "logged steps", "mean return", "steps/s", "bytes a step"],
        rows,
    )
    console = Console()
    console.print(
        f"recorded {report.recorded_steps:,} steps at {report.recorded_steps_per_s:,.0f} steps/s, "
        f"{report.bytes_per_step:.1f} bytes a step ({report.raw_bytes_per_step:.0f} in memory)",
        highlight=False,
    )
    console.print(f"data set  {report.uri}", highlight=False, soft_wrap=True)
    plot = report.plot if report.plot is not None else f"none: {missing_plots()}"
    console.print(f"plot      {plot}", highlight=False, soft_wrap=True, markup=False)
