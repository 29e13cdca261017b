"""`rlio evaluate`: estimates a policy's return from the episodes in a data set."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlio.cli.failures import print_json
from rlio.cli.options import Json, StorageOptions, Uri, parse_storage_options
from rlio.cli.tables import check_plot, new_plot, print_table, progress_of
from rlio.errors import OptionError, excerpt

if TYPE_CHECKING:
    from rlio.evaluation.estimates import Measured, OffPolicyEstimate
    from rlio.evaluation.target import Target

__all__ = ["draw_intervals", "evaluate"]


def evaluate(
    uri: Uri,
    policy: Annotated[
        str,
        typer.Option(
            metavar="MODULE:NAME",
            help="The policy to evaluate: a Policy, a Policy class, or a function (obs, actions) -> "
            "log-probabilities. The module may be in the current folder; importing it runs its code.",
        ),
    ],
    gamma: Annotated[float, typer.Option(help="Discount per step.")],
    estimators: Annotated[
        list[str] | None,
        typer.Option(
            "--estimator",
            help="is, pdis, wis, wpdis (default: these four), stepwise_wis, or dm, dr, wdr, which "
            "fit a model. Repeat the option for several.",
        ),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Folder written by Policy.save: state of the policy to evaluate.")
    ] = None,
    epsilon_greedy: Annotated[
        float, typer.Option(help="Evaluate the policy with this probability of a random action.")
    ] = 0.0,
    explore: Annotated[bool, typer.Option(help="Evaluate the policy with exploration.")] = True,
    bandit: Annotated[bool, typer.Option("--bandit", help="Each row is an episode of one step.")] = False,
    drop_incomplete: Annotated[
        bool, typer.Option("--drop-incomplete", help="Skip incomplete episodes, and count them.")
    ] = False,
    policy_id: Annotated[
        str | None, typer.Option(help="Recorded policy whose rows to use, if there are several.")
    ] = None,
    confidence: Annotated[float, typer.Option(help="Level of the intervals, above 0 and below 1.")] = 0.95,
    value_bounds: Annotated[
        tuple[float, float] | None,
        typer.Option(
            help="Least and greatest possible weighted return of an episode: adds a concentration bound."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of intervals and models.")] = 0,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Read rows and run the policy in tasks of a Ray cluster (RAY_ADDRESS)."),
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Plot intervals to this .png, .svg or .pdf.")] = None,
    as_json: Json = False,
    storage_options: StorageOptions = None,
) -> None:
    """Estimate a policy's return from the record of another policy, with intervals and diagnostics.

    Rows need the probabilities of their actions (action_logp or action_prob), and episodes must have ends;
    see docs/evaluation.md. Exit codes: 0, success; 1, the data is damaged, or lacks what the estimators need;
    2, the data set does not exist, cannot be read, or an option is wrong.
    """
    from rlio.dataset.opening import open_dataset
    from rlio.evaluation.evaluator import evaluate_offline
    from rlio.evaluation.fitted_q import FittedQ
    from rlio.evaluation.intervals import IntervalOptions

    if plot is not None:
        check_plot(plot)
    if set(estimators or ()) & {"dm", "dr", "wdr"}:
        import torch

        # One thread fits small networks faster, much faster if other processes are busy.
        torch.set_num_threads(1)
    dataset = open_dataset(uri, storage_options=parse_storage_options(storage_options))
    stored = dataset.policy_spaces
    spaces = next((pair for pid, pair in stored.items() if policy_id in (None, pid)), None)
    target = _target(
        policy, spaces, checkpoint=checkpoint, seed=seed, explore=explore, epsilon_greedy=epsilon_greedy
    )
    judged: dict[str, Any] = {
        "gamma": gamma,
        "estimators": estimators or ["is", "pdis", "wis", "wpdis"],
        "bandit": bandit,
        "incomplete": "drop" if drop_incomplete else "raise",
        "policy_id": policy_id,
        "q_model": FittedQ(seed=seed),
        "intervals": IntervalOptions(confidence=confidence, value_bounds=value_bounds, seed=seed),
    }
    if ray:
        from rlio.distributed import evaluate_offline as evaluate_by_ray

        found = evaluate_by_ray(dataset, target, **judged)
    else:
        with progress_of(as_json=as_json, unit=" rows")("evaluate", len(dataset)) as advance:
            found = evaluate_offline(dataset, target, progress=advance, **judged)
    if plot is not None:
        draw_intervals(found, plot)
    if as_json:
        print_json({name: _finite(estimate.to_json()) for name, estimate in found.items()})
    else:
        _print(uri, found)


def _target(
    policy: str, spaces: tuple[Any, Any] | None, *, checkpoint: str | None, seed: int, **how: Any
) -> Target:
    """Build the target; a policy without spaces gets those of the data set.

    Raises:
        OptionError: The policy does not exist, has no spaces, or an option does not apply to it.
    """
    from rlio.evaluation.target import Target
    from rlio.policies.policy import Policy
    from rlio.policies.policy_spec import load_object

    # The current folder counts, as for ``python -m``.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = load_object(policy)
    except OptionError as error:
        raise OptionError(f"--policy: {error}") from error
    if isinstance(found, type) and issubclass(found, Policy):
        found = found()
    if not isinstance(found, Policy):
        if not callable(found):
            raise OptionError(f"--policy {policy} is {excerpt(found)}: expected a Policy or a function")
        if checkpoint is not None:
            raise OptionError("--checkpoint needs a policy, but --policy names a function: omit --checkpoint")
        seen, acts = spaces or (None, None)
        return Target(found, observation_space=seen, action_space=acts, **how)
    if not found.is_bound:
        if spaces is None:
            raise OptionError(f"the data set has no spaces, and {policy} has none: call bind() in its module")
        found.bind(*spaces, seed=seed)
    if checkpoint is not None:
        found.load(checkpoint)
    return Target(found, **how)


def _print(uri: str, found: Mapping[str, OffPolicyEstimate]) -> None:
    """Print the table, then what all estimators share."""
    first = next(iter(found.values()))
    bounded = any(estimate.v_target.concentration for estimate in found.values())
    headings = ["estimator", "v_target", "std. error", f"{first.confidence:.0%} interval"]
    headings += ["for sure"] * bounded + ["v_gain", "interval of v_gain", "ratio", "reliable"]
    rows = []
    for name, estimate in found.items():
        target, gain, ratio = estimate.v_target, estimate.v_gain, estimate.v_gain_ratio
        row = [name, f"{target.value:.6g}", f"{target.standard_error:.2g}", _checked_interval(target)]
        row += [_interval(target.concentration)] * bounded
        row += [f"{gain.value:.6g}", _checked_interval(gain), "" if ratio is None else f"{ratio:.4g}"]
        rows.append([*row, "yes" if estimate.reliable else "no"])
    print_table(uri, headings, rows)
    typer.echo(
        f"v_behavior {first.v_behavior}: {first.episodes} episodes, {first.steps} steps, "
        f"gamma {first.gamma:g}"
        + (f"; incomplete episodes left out: {first.left_out}" if first.left_out else "")
    )
    overlap = next((estimate.overlap for estimate in found.values() if estimate.overlap is not None), None)
    if overlap is not None:
        typer.echo(f"overlap: {overlap}")
    doubted: dict[tuple[str, ...], list[str]] = {}
    for name, estimate in found.items():
        doubted.setdefault(estimate.doubts, []).append(name)
    for doubts, names in doubted.items():
        if doubts:
            typer.echo(f"not reliable: {', '.join(names)}: {'; '.join(doubts)}")


def _checked_interval(measured: Measured) -> str:
    return _interval(measured.interval) + ("" if measured.reliable else " (not reliable)")


def _interval(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.6g} to {ends[1]:.6g}"


def _finite(value: Any) -> Any:
    """Return ``value`` with text in place of numbers that JSON cannot express."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def draw_intervals(found: Mapping[str, OffPolicyEstimate], path: Path) -> None:
    """Draw each estimate with its interval, and v_behavior as a line, into the file ``path``.

    Raises:
        MissingExtra: matplotlib is not installed.
        OptionError: The file's extension names no known format, or the file cannot be written.
    """
    first = next(iter(found.values()))
    figure, axes = new_plot(width=1.5 + 1.1 * max(len(found), 3))
    for place, estimate in enumerate(found.values()):
        target = estimate.v_target
        if target.concentration is not None:
            wide = axes.plot([place, place], target.concentration, color="lightgray", linewidth=6)
            wide[0].set_label(None if place else "concentration bound")
        style = "solid" if target.reliable else "dotted"
        axes.plot([place, place], target.interval, color="black", linestyle=style)
        axes.plot([place], [target.value], "o", color="black")
    axes.axhspan(*first.v_behavior.interval, color="tab:blue", alpha=0.2)
    axes.axhline(first.v_behavior.value, color="tab:blue", label="as recorded")
    names = [name if one.v_target.reliable else f"{name}\n(not reliable)" for name, one in found.items()]
    axes.set_xticks(range(len(found)), names)
    axes.set_xlim(-0.5, len(found) - 0.5)
    axes.set_ylabel("discounted return of an episode")
    axes.set_title(f"{first.confidence:.0%} intervals, {first.episodes} episodes")
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise OptionError(f"--plot {excerpt(str(path))}: {error}") from error
