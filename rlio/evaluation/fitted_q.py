"""`FittedQ`: fitted Q evaluation, a model of action values under a given policy.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> from rlio.evaluation.target import Target
    >>> ones = Target(lambda obs, a: np.where(a == 1, 0.0, -np.inf), observation_space=Box(0.0, 1.0, (1,)),
    ...     action_space=Discrete(2))
    >>> rng = np.random.default_rng(0)
    >>> obs, actions = np.ones((500, 1), np.float32), rng.integers(0, 2, 500)
    >>> steps = Transitions(obs, actions, 2.0 * actions, obs, np.ones(500, bool), np.ones(500, bool))
    >>> values = FittedQ(hidden=(), iterations=400, learning_rate=0.02).fit(steps, ones, gamma=1.0)
    >>> values.state_values(obs[:1]).round(1).tolist()
    [2.0]

Source: Le, Voloshin, Yue, "Batch policy learning under constraints" (2019).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import Column, row_count, take_column
from rlio.batch.columns import Columns
from rlio.batch.nested import map_structure
from rlio.errors import MissingColumn, OptionError
from rlio.evaluation.complete_episodes import Episodes
from rlio.evaluation.target import Target
from rlio.policies.torch_arrays import writable
from rlio.support.options import check_count, check_number, set_options

if TYPE_CHECKING:
    import torch

__all__ = ["FittedQ", "ModelValues", "QModel", "QValues", "Transitions", "cross_fitted"]

Floats = NDArray[np.float64]
# Rows in one pass through a network without training.
_ROWS = 65_536


@dataclass(frozen=True)
class Transitions:
    """Consecutive steps of whole episodes.

    Attributes:
        obs: (N, ...), nested like the space.
        actions: Likewise.
        rewards: (N,).
        new_obs: Like ``obs``; arbitrary where it is unknown.
        known: Whether ``new_obs`` is known, (N,) bool.
        terminated: Whether the step ended its episode by termination, (N,) bool.
    """

    obs: Column
    actions: Column
    rewards: Floats
    new_obs: Column
    known: NDArray[np.bool_]
    terminated: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.rewards)

    @classmethod
    def of(cls, episodes: Episodes, *, bandit: bool) -> Transitions:
        """Return the steps of ``episodes``. Without ``new_obs``, uses the next step's ``obs``.

        Raises:
            MissingColumn: The column that shows which episodes terminated is absent.
        """
        columns: Any = episodes.columns
        rows = len(columns[Columns.REWARDS])
        if bandit:
            terminated = np.ones(rows, bool)
        elif Columns.TERMINATEDS in columns:
            terminated = columns[Columns.TERMINATEDS].astype(bool)
        else:
            raise MissingColumn(
                "a model needs to know which steps terminated their episode",
                column=Columns.TERMINATEDS,
            )
        obs = columns[Columns.OBS]
        if Columns.NEXT_OBS in columns:
            new_obs = columns[Columns.NEXT_OBS]
            known = columns.get(Columns.NEXT_OBS_VALID, np.ones(rows, bool)).astype(bool)
        else:
            following = np.minimum(np.arange(1, rows + 1), rows - 1)
            new_obs = take_column(obs, following)
            known = np.ones(rows, bool)
            known[np.cumsum(episodes.lengths) - 1] = False
        return cls(obs, columns[Columns.ACTIONS], columns[Columns.REWARDS], new_obs, known, terminated)

    def take(self, index: NDArray[np.int64]) -> Transitions:
        """Return the steps ``index``."""
        return Transitions(**take_column(vars(self), index))


class QValues(Protocol):
    """Values of a fitted model."""

    def action_values(self, obs: Any, actions: Any) -> Floats:
        """Return the value of each action, (N,)."""

    def state_values(self, obs: Any) -> Floats:
        """Return the value of each observation under the judged policy, (N,)."""


class QModel(Protocol):
    """A model that can be fitted: `FittedQ`, or any object with this method."""

    def fit(self, transitions: Transitions, target: Target, *, gamma: float) -> QValues:
        """Fit the values of ``target`` without changing the model itself, which is fitted several times."""


@dataclass(frozen=True)
class ModelValues:
    """A model's values of N steps of n episodes.

    Attributes:
        states: (N,).
        actions: (N,).
        finals: Value after the last step of each episode, (n,): 0 if it terminated or the observation is
            unknown.
    """

    states: Floats
    actions: Floats
    finals: Floats


def cross_fitted(
    model: QModel,
    transitions: Transitions,
    lengths: NDArray[np.int64],
    target: Target,
    *,
    gamma: float,
    folds: int,
) -> ModelValues:
    """Return values of each episode's steps by a model that was fitted to other episodes.

    Args:
        model: The model, fitted ``folds`` times.
        transitions: N steps.
        lengths: Steps of each episode, (n,).
        target: The judged policy.
        gamma: Discount per step.
        folds: Parts of the episodes; 1: the model is fitted to all of them.

    Raises:
        OptionError: There are fewer episodes than folds.
    """
    if folds > len(lengths):
        raise OptionError(f"folds={folds}, but only {len(lengths)} episodes: expected at least one per fold")
    # Drawn at random, because data that alternates, as the arms of a trial do, would put all of a kind into
    # one fold.
    fold_of = np.random.default_rng(0).permutation(len(lengths)) % folds
    rows_of = np.repeat(fold_of, lengths)
    last = np.cumsum(lengths) - 1
    found = ModelValues(np.zeros(len(transitions)), np.zeros(len(transitions)), np.zeros(len(lengths)))
    for fold in range(folds):
        rows, ends = np.flatnonzero(rows_of == fold), np.flatnonzero(fold_of == fold)
        fitted_to = np.flatnonzero(rows_of != fold) if folds > 1 else rows
        values = model.fit(transitions.take(fitted_to), target, gamma=gamma)
        judged, finals = transitions.take(rows), transitions.take(last[ends])
        found.states[rows] = values.state_values(judged.obs)
        found.actions[rows] = values.action_values(judged.obs, judged.actions)
        goes_on = finals.known & ~finals.terminated
        found.finals[ends[goes_on]] = values.state_values(finals.take(np.flatnonzero(goes_on)).new_obs)
    return found


@dataclass(frozen=True, kw_only=True)
class FittedQ:
    """Options for fitting a network: Q(s, a) to r + gamma * E[Q(s', a')], with a' from the policy.

    The network is a perceptron. For Discrete actions, it takes observations and has one output per action,
    and the expectation is exact. Otherwise it takes observations and actions, and the expectation is the mean
    over drawn actions of the policy. The value after a terminated episode is 0; a truncated one continues, so
    values are those without the time limit.

    Attributes:
        hidden: Sizes of its layers; (): linear, which is a table for Discrete observations.
        iterations: Steps of the Adam optimizer.
        batch_size: Data steps in each.
        learning_rate: Initial rate; it decreases to 0, so that the values settle.
        tau: Fraction by which the target network follows at each step.
        action_samples: Actions per expectation, if they are not Discrete.
        seed: Seed of weights, batches and actions.
        device: Torch device of the network.

    Raises:
        OptionError: A value is out of range.
    """

    hidden: Sequence[int] = (64, 64)
    iterations: int = 3000
    batch_size: int = 256
    learning_rate: float = 1e-3
    tau: float = 0.02
    action_samples: int = 8
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("iterations", "batch_size", "action_samples"):
            set_options(self, **{name: check_count(name, getattr(self, name), least=1)})
        set_options(
            self,
            learning_rate=check_number("learning_rate", self.learning_rate, above=0),
            tau=check_number("tau", self.tau, above=0, most=1),
        )

    def fit(self, transitions: Transitions, target: Target, *, gamma: float) -> QValues:
        """Fit and return the values of ``target``.

        Raises:
            OptionError: The spaces are unknown, or no step is usable.
        """
        usable = np.flatnonzero(transitions.terminated | transitions.known)
        if not len(usable):
            raise OptionError("no step has a next observation (new_obs), or terminates its episode")
        kind = _NumberQ if target.choices is None else _ChoiceQ
        network = kind(target, self)
        network.learn(transitions.take(usable), gamma)
        return network


class _Network(ABC):
    """A torch module that is fitted, and then returns its values."""

    def __init__(self, target: Target, options: FittedQ) -> None:
        import torch

        seen, acts = target.observation_space, target.action_space
        if seen is None or acts is None:
            raise OptionError(
                "a model needs spaces: pass Target(function, observation_space=, action_space=)"
            )
        self._target, self._options, self._spaces = target, options, (seen, acts)
        self._rng = np.random.default_rng(options.seed)
        self._scale = 1.0
        generator = torch.Generator(options.device).manual_seed(options.seed)
        self._module = self._new_module(generator).to(options.device)

    @abstractmethod
    def _new_module(self, generator: torch.Generator) -> torch.nn.Module:
        """Return the module for the spaces."""

    @abstractmethod
    def _values(self, module: torch.nn.Module, obs: Any, actions: Any) -> torch.Tensor:
        """Return the module's values of actions, (N,), from tensors of N rows."""

    @abstractmethod
    def _following(self, obs: Any) -> Any:
        """Return arrays of N rows that describe the policy's actions at N observations."""

    @abstractmethod
    def _expected(self, module: torch.nn.Module, obs: Any, following: Any) -> torch.Tensor:
        """Return the module's values of observations, (N,), under the actions from `_following`."""

    def _tensors(self, value: Any) -> Any:
        import torch

        return map_structure(lambda leaf: torch.as_tensor(writable(leaf)).to(self._options.device), value)

    def learn(self, steps: Transitions, gamma: float) -> None:
        """Fit the module to ``steps``."""
        import torch

        options = self._options
        # Normalised, so that rewards of any size are learned at the same rate.
        self._scale = float(np.sqrt((steps.rewards**2).mean())) or 1.0
        # Observations after the end of an episode may be anything, NaN too.
        following_obs = map_structure(lambda leaf: _zeroed(leaf, steps.terminated), steps.new_obs)
        discounts = np.where(steps.terminated, 0.0, gamma)
        obs, actions, new_obs, following, rewards, after = self._tensors(
            (
                steps.obs,
                steps.actions,
                following_obs,
                self._following(following_obs),
                (steps.rewards / self._scale).astype(np.float32),
                discounts.astype(np.float32),
            )
        )
        slow = copy.deepcopy(self._module)
        optimizer = torch.optim.Adam(self._module.parameters(), lr=options.learning_rate)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, options.iterations)
        for _ in range(options.iterations):
            rows = self._tensors(self._rng.integers(0, len(steps), options.batch_size))
            with torch.no_grad():
                expected = self._expected(slow, _at(new_obs, rows), _at(following, rows))
                goals = rewards[rows] + after[rows] * expected
            values = self._values(self._module, _at(obs, rows), _at(actions, rows))
            loss = torch.nn.functional.mse_loss(values, goals)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call] # torch does not type it
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                for old, new in zip(slow.parameters(), self._module.parameters(), strict=True):
                    old.lerp_(new, options.tau)

    def action_values(self, obs: Any, actions: Any) -> Floats:
        """Return the value of each action, (N,)."""
        return self._in_parts(
            lambda rows: self._values(self._module, *self._tensors(_at((obs, actions), rows))), obs
        )

    def state_values(self, obs: Any) -> Floats:
        """Return the value of each observation under the judged policy, (N,)."""

        def values(rows: slice) -> torch.Tensor:
            seen = _at(obs, rows)
            return self._expected(self._module, *self._tensors((seen, self._following(seen))))

        return self._in_parts(values, obs)

    def _in_parts(self, values: Callable[[slice], torch.Tensor], obs: Any) -> Floats:
        import torch

        with torch.inference_mode():
            parts = [
                values(slice(start, start + _ROWS)).double().cpu().numpy() * self._scale
                for start in range(0, row_count(obs) or 0, _ROWS)
            ]
        return np.concatenate([np.zeros(0), *parts])


class _ChoiceQ(_Network):
    """Discrete actions: one output each."""

    def _new_module(self, generator: torch.Generator) -> torch.nn.Module:
        from rlio.policies.networks import mlp

        choices = self._target.choices
        assert choices is not None
        self._start = int(choices[0])
        return mlp(self._spaces[0], outputs=len(choices), hidden=self._options.hidden, generator=generator)

    def _values(self, module: torch.nn.Module, obs: Any, actions: Any) -> torch.Tensor:
        found: torch.Tensor = module(obs)
        return found.gather(1, (actions.long() - self._start)[:, None])[:, 0]

    def _following(self, obs: Any) -> Any:
        return self._target.action_probabilities(obs).astype(np.float32)

    def _expected(self, module: torch.nn.Module, obs: Any, following: Any) -> torch.Tensor:
        found: torch.Tensor = (module(obs) * following).sum(-1)
        return found


class _NumberQ(_Network):
    """Other actions: they are inputs, and the policy's actions are drawn."""

    def _new_module(self, generator: torch.Generator) -> torch.nn.Module:
        from gymnasium.spaces import Tuple

        from rlio.policies.networks import mlp

        return mlp(Tuple(self._spaces), outputs=1, hidden=self._options.hidden, generator=generator)

    def _values(self, module: torch.nn.Module, obs: Any, actions: Any) -> torch.Tensor:
        found: torch.Tensor = module((obs, actions))[:, 0]
        return found

    def _following(self, obs: Any) -> Any:
        drawn = [self._target.draw_actions(obs, self._rng) for _ in range(self._options.action_samples)]
        return map_structure(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves], axis=1), *drawn)

    def _expected(self, module: torch.nn.Module, obs: Any, following: Any) -> torch.Tensor:
        samples = self._options.action_samples
        repeated = map_structure(lambda leaf: leaf.repeat_interleave(samples, dim=0), obs)
        actions = map_structure(lambda leaf: leaf.flatten(0, 1), following)
        return self._values(module, repeated, actions).reshape(-1, samples).mean(-1)


def _at(value: Any, rows: Any) -> Any:
    """Return the rows of each array or tensor in ``value``."""
    return map_structure(lambda leaf: leaf[rows], value)


def _zeroed(leaf: NDArray[Any], rows: NDArray[np.bool_]) -> NDArray[Any]:
    """Return ``leaf`` with zeros in ``rows``."""
    found = leaf.copy()
    found[rows] = 0
    return found
