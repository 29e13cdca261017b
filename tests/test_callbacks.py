"""Callbacks: only what somebody overrides is called, and several are one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from rlio.errors import OptionError
from rlio.sampling.callbacks import Callbacks, RunningEpisode, combine, overridden

EPISODE = RunningEpisode(eps_id=3)


class Tells(Callbacks):
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def on_episode_end(
        self, *, episode: RunningEpisode, error: Exception | None = None, **kwargs: Any
    ) -> None:
        self.log.append(f"{self.name}:{episode.eps_id}:{error}")


def test_every_callback_of_the_table_that_belongs_to_a_worker_is_there() -> None:
    """Rows "callbacks" of 2.4."""
    hooks = {name for name in vars(Callbacks) if name.startswith("on_")}
    assert hooks >= {
        "on_environment_created",
        "on_sub_environment_created",
        "on_episode_created",
        "on_episode_start",
        "on_episode_step",
        "on_episode_end",
        "on_sample_end",
        "on_postprocess_trajectory",
        "on_create_policy",
        "on_learn_on_batch",
        "on_evaluate_start",
        "on_evaluate_end",
        "on_checkpoint_loaded",
    }
    for name in hooks:
        parameters = list(inspect.signature(getattr(Callbacks, name)).parameters.values())[1:]
        kinds = {parameter.kind for parameter in parameters}
        assert kinds == {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}, name


def test_nothing_is_overridden_unless_somebody_does() -> None:
    assert overridden(Callbacks()) == frozenset()
    assert overridden(combine(None)) == frozenset()
    assert overridden(combine([Callbacks, Callbacks])) == frozenset()
    assert overridden(Tells("a", [])) == {"on_episode_end"}
    callbacks: Any = Callbacks()
    callbacks.on_sample_end = print
    assert overridden(callbacks) == {"on_sample_end"}

    class Inherits(Tells):
        pass

    assert overridden(Inherits("a", [])) == {"on_episode_end"}


def test_several_callbacks_are_called_in_their_order_and_may_be_nested() -> None:
    """Row "list of callback classes supported (make_callback)"."""
    log: list[str] = []
    inner = combine([Tells("b", log), Callbacks])
    callbacks = combine([lambda: Tells("a", log), inner, Tells("c", log)])
    assert overridden(callbacks) == {"on_episode_end"}
    callbacks.on_episode_end(runner=None, env=None, episode=EPISODE, error=ValueError("x"))
    callbacks.on_episode_start(runner=None, env=None, episode=EPISODE)
    assert log == ["a:3:x", "b:3:x", "c:3:x"]


def test_one_callback_stays_itself_and_a_class_is_made_once() -> None:
    own = Tells("a", [])
    assert combine(own) is own
    assert combine([own]) is own
    assert type(combine(Callbacks)) is Callbacks


@pytest.mark.parametrize("given", [3, [3], "callbacks", [int], dict])
def test_what_gives_no_callbacks_is_refused(given: Any) -> None:
    with pytest.raises(OptionError, match="expected Callbacks"):
        combine(given)


def test_a_callback_that_nobody_would_call_is_refused() -> None:
    """A slip, and those of RLlib that belong to an Algorithm."""

    class Slip(Callbacks):
        def on_episode_ended(self, **kwargs: Any) -> None:
            raise AssertionError

        def on_train_result(self, **kwargs: Any) -> None:
            raise AssertionError

    for given in (Slip, Slip(), [Callbacks, Slip]):
        with pytest.raises(
            OptionError, match=r"Slip has on_episode_ended, on_train_result, .* on_episode_end,"
        ):
            combine(given)


def test_an_episode_knows_who_acts_for_whom() -> None:
    assert EPISODE.policy_for() == "default_policy"
    episode = RunningEpisode(eps_id=1, agent_policies={"a": "left"})
    assert episode.policy_for("a") == "left"
    with pytest.raises(OptionError, match="agents so far are \\['a'\\]"):
        episode.policy_for("b")
