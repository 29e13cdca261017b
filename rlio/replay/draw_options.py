"""`draw_of`: the keywords of readers, stores and samplers that say what a unit is, as a `Draw`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypedDict

from rlio.errors import OptionError, excerpt
from rlio.query.derived_columns import MC_RETURN, named_column
from rlio.query.filters import RowFilter, RowFunction
from rlio.query.splits import Split
from rlio.replay.draws import DEFAULT_DISCOUNT, Draw
from rlio.replay.n_step import NStep
from rlio.replay.sequences import Sequences, WholeEpisodes
from rlio.support.options import default_options

__all__ = ["DrawKeywords", "LiveDrawKeywords", "LiveUnitKeywords", "UnitKeywords", "draw_of"]


class LiveUnitKeywords(TypedDict, total=False):
    """What a unit is, also of rows that come and go, with defaults."""

    draw: Annotated[NStep | Sequences | WholeEpisodes | None, None]
    policy: Annotated[str | None, None]
    filter: Annotated[str | RowFunction | RowFilter | None, None]
    views: Annotated[bool, False]
    indexes: Annotated[bool, False]


class UnitKeywords(LiveUnitKeywords, total=False):
    """What a unit is: the keywords of `DrawKeywords` except ``columns``, with defaults."""

    split: Annotated[tuple[Literal["train", "test"], float] | None, None]
    derive: Annotated[Sequence[str], ()]


class LiveDrawKeywords(LiveUnitKeywords, total=False):
    """What a reader of live rows draws, with defaults; see `draw_of`."""

    columns: Annotated[Sequence[str] | None, None]


class DrawKeywords(UnitKeywords, total=False):
    """The keywords that all samplers of a store share, with defaults; see `draw_of`."""

    columns: Annotated[Sequence[str] | None, None]


_DEFAULTS: Final = default_options(DrawKeywords)


def draw_of(keywords: DrawKeywords | LiveDrawKeywords, *, columns: Sequence[str] | None = None) -> Draw:
    """Turn the keywords that all samplers share into a `Draw`.

    Args:
        keywords: ``columns``: logical columns; None: all. `rlio.DatasetReader` describes the others.
        columns: Logical columns, if the keywords have none.

    Raises:
        OptionError: An option is illegal, or two options exclude each other.
    """
    given: dict[str, Any] = {**_DEFAULTS, "columns": columns, **keywords}
    names, shape = given["columns"], given["draw"]
    if not isinstance(shape, NStep | Sequences | WholeEpisodes | None):
        raise OptionError(
            f"draw={excerpt(shape)}: expected rlio.NStep(n, gamma=...), rlio.Sequences(length, ...), "
            "rlio.WholeEpisodes(), or None for single rows"
        )
    if isinstance(given["derive"], str):
        raise OptionError(f"derive={excerpt(given['derive'])}: expected a list of names")
    derived = list(map(named_column, given["derive"]))
    derive = tuple(dict.fromkeys(name for name, _ in derived))
    chosen = None if given["filter"] is None else RowFilter.of_option(given["filter"])
    if given["split"] is not None:
        chosen = RowFilter.on_side(Split.of(given["split"]), chosen)
    return Draw(
        columns=None if names is None else frozenset(names).difference(derive),
        n_step=shape if isinstance(shape, NStep) else None,
        sequences=shape if isinstance(shape, Sequences) else None,
        episodes=isinstance(shape, WholeEpisodes),
        policy=given["policy"],
        filter=chosen,
        views=given["views"],
        indexes=given["indexes"],
        derive=derive,
        gamma=_discount([discount for name, discount in derived if name == MC_RETURN], chosen),
    )


def _discount(stated: Sequence[float | None], chosen: RowFilter | None) -> float:
    """The discount of ``mc_return``, which the rows and the filter share.

    Args:
        stated: That of each time it is derived; None: not stated.
        chosen: The filter, whose text may state it too.

    Raises:
        OptionError: Two are stated.
    """
    found = {DEFAULT_DISCOUNT if discount is None else discount for discount in stated}
    if chosen is not None and chosen.discount is not None:
        found.add(chosen.discount)
    if len(found) > 1:
        raise OptionError(
            f"derive and filter have mc_return with the discounts {', '.join(map(str, sorted(found)))}: one "
            "reader has one; without parentheses it is 0.99 in derive, and that of derive in filter"
        )
    return found.pop() if found else DEFAULT_DISCOUNT
