"""`Mapping`: what the columns of a table mean, for tables whose columns have other names than rlio's.

Not here: how a table is read by one (`rlio.formats.tables.mapping`).

Example:
    >>> mapping = Mapping({"obs": ["x", "y"], "actions": "a"}, episode="trip", next_obs="derive")
    >>> mapping.episode, mapping.final_row
    (('trip',), False)
    >>> Mapping({"obs": "x"}, terminated=True, truncated="late")
    Traceback (most recent call last):
    ...
    rlio.errors.OptionError: terminated=True and truncated='late' contradict each other: leave one out
"""

from __future__ import annotations

from collections import abc
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np

from rlio.batch.columns import Columns
from rlio.batch.other_names import MEANT
from rlio.errors import OptionError, excerpt
from rlio.support.options import check_flag, checked_keywords, set_options
from rlio.support.spaces import check_spaces

__all__ = ["DERIVE", "Mapping", "Spec", "dotted", "nested"]

#: What a column is made of: a column; several, each one number a row, side by side; or parts by name.
Spec: TypeAlias = str | Sequence[str] | abc.Mapping[str, Any]

DERIVE: Final = "derive"


@checked_keywords
@dataclass(frozen=True)
class Mapping:
    """What the columns of a table mean; see docs/mapping.md.

    Row t has the observation, the action, and the reward and the flags that followed it. Rows of an episode
    are adjacent, in the order of time. A name may be a path to a part of a nested column, such as
    ``"info.speed"``. The values are copied.

    Attributes:
        columns: rlio's column, or a part of one (``obs/position``) -> a column of the table; or a list of
            columns with one number a row, joined into one array; or a dict of these, a nested column.
        episode: The column, or columns, whose value changes where an episode begins; a tuple, () for None.
            Whole numbers become ``eps_id``; for others, it numbers the episodes.
        starts: The flag that marks the first row of each episode, instead of ``episode``.
        lengths: The array that has the number of rows of each episode, instead of ``episode``.
        ends: The array that has, for each episode, the number of the row after its last, instead of
            ``episode``. A 0 before, and the number of rows at the end, may be absent.
        terminated: The flag that marks the last row of a terminated episode; True: all terminated.
            ``"not x"``: where x is 0, such as a mask of rows after which the episode goes on.
        truncated: The same for truncated episodes. None: complete episodes that are not terminated are
            truncated.
        next_obs: The columns of ``new_obs``, as in ``columns``; or ``"derive"``: from the next row of the
            episode. The last row of each episode then has ``new_obs_valid`` False.
        codes: A column of the table -> its categories, which become 0, 1, 2, ...; None, or the name of the
            column alone: its values, sorted. A dict of tuples.
        dtypes: rlio's column, or a part of one -> dtype, such as ``{"obs": "float32"}``.
        per_file: True: an episode ends with its file, and ids are unique only within a file; False: an
            episode may continue in the next file; None: not known.
        per_row: Whether each row is an episode: its cells are lists with an item a step, or values for all.
            ``lengths`` is then a column of the number of steps, without padding. If the lists of obs have one
            item more than others, it is the final observation.
        valid: With ``per_row``, a mask of the steps that are no padding, such as ``"not is_pad"``.
        final_row: Whether each episode has a further row, with its final observation only.
        sort: The column, or columns, by which the rows of an episode are sorted, such as its times; a tuple.
            The rows of an episode then need not be adjacent.
        shifted: rlio's columns whose values are stored a row later, with the observation that followed, such
            as ``("actions", "rewards")``; a tuple. The last row of each episode is then a final row.
        ragged: The columns of the table whose cells are lists of any number of items, such as tokens; a
            tuple. Without it, all cells of a column have one shape.
        spaces: (observation space, action space) of the rows; None: not known.

    Raises:
        OptionError: A value is illegal, or two contradict each other.
    """

    columns: abc.Mapping[str, Spec]
    _: KW_ONLY
    episode: str | Sequence[str] | None = None
    starts: str | None = None
    lengths: str | None = None
    ends: str | None = None
    terminated: str | bool | None = None
    truncated: str | bool | None = None
    next_obs: Spec | None = None
    codes: str | Sequence[str] | abc.Mapping[str, Sequence[Any] | None] = field(default_factory=dict)
    dtypes: abc.Mapping[str, str] | None = field(default_factory=dict)
    per_file: bool | None = None
    per_row: bool = False
    valid: str | None = None
    final_row: bool = False
    sort: str | Sequence[str] = ()
    shifted: str | Sequence[str] = ()
    ragged: str | Sequence[str] = ()
    spaces: tuple[Any, Any] | None = None

    #: Columns that other fields stand for.
    instead: ClassVar[abc.Mapping[str, str]] = MappingProxyType(
        {
            Columns.EPS_ID: "episode",
            Columns.TERMINATEDS: "terminated",
            Columns.TRUNCATEDS: "truncated",
            Columns.NEXT_OBS: "next_obs",
            Columns.NEXT_OBS_VALID: "next_obs",
            Columns.DONES: "terminated",
        }
    )

    def __post_init__(self) -> None:
        set_options(
            self,
            columns=self._checked_columns(),
            episode=_checked_names("episode", self.episode),
            codes=_checked_codes(self.codes),
            dtypes=_checked_dtypes(self.dtypes),
            per_file=None if self.per_file is None else check_flag("per_file", self.per_file),
            per_row=check_flag("per_row", self.per_row),
            final_row=check_flag("final_row", self.final_row),
            sort=_checked_names("sort", self.sort),
            shifted=_checked_names("shifted", self.shifted),
            ragged=_checked_names("ragged", self.ragged),
        )
        check_spaces(self.spaces)
        self._check_cuts()
        for name in ("terminated", "truncated"):
            if not isinstance(getattr(self, name), str | bool | None):
                raise OptionError(f"{name}={excerpt(getattr(self, name))}: expected a column, True or False")
        if self.terminated is True and self.truncated not in (None, False):
            raise OptionError(
                f"terminated=True and truncated={excerpt(self.truncated)} contradict each other: leave one "
                "out"
            )
        tops = nested(self.columns)
        if self.next_obs is not None:
            _check_spec("next_obs", self.next_obs)
            set_options(self, next_obs=deepcopy(self.next_obs))
            if Columns.NEXT_OBS in tops:
                raise OptionError("columns= and next_obs= both name new_obs: leave out one of them")
        if self.next_obs == DERIVE and Columns.OBS not in tops:
            raise OptionError("next_obs='derive' needs columns={'obs': ...}")
        self._check_shifted(tops)
        if self.final_row and self.next_obs != DERIVE:
            raise OptionError("final_row=True needs next_obs='derive', which takes new_obs from that row")
        known = (*tops, Columns.NEXT_OBS)
        if unknown := [name for name in self.dtypes or () if dotted(name).partition(".")[0] not in known]:
            raise OptionError(f"dtypes={excerpt(unknown)}: expected columns of rlio that are mapped")

    def _check_cuts(self) -> None:
        """Refuse fields that contradict each other in where episodes begin."""
        for name in ("starts", "lengths", "ends", "valid"):
            if not isinstance(value := getattr(self, name), str | None) or value == "":
                raise OptionError(f"{name}={excerpt(value)}: expected the name of a column")
        names = ("per_row", "starts", "ends") if self.per_row else ("episode", "starts", "lengths", "ends")
        given = [name for name in names if getattr(self, name)]
        if len(given) > 1:
            shown = [f"{name}={excerpt(getattr(self, name))}" for name in given]
            raise OptionError(f"{' and '.join(shown)} both say where episodes begin: leave one out")
        if self.per_file is False and given and given[0] in ("per_row", "lengths", "ends"):
            raise OptionError(
                f"per_file=False and {given[0]}= contradict each other: no episode continues in the next "
                "file; leave out per_file="
            )
        if self.sort and (given[:1] not in ([], ["episode"]) or not (given or self.per_file)):
            by = f"sort={excerpt(self.sort)}"
            if given:
                raise OptionError(
                    f"{by} and {given[0]}={excerpt(getattr(self, given[0]))} contradict each other: the "
                    "latter says which rows are an episode by their order"
                )
            raise OptionError(f"{by} needs episode=, or per_file=True: it sorts the rows of each episode")
        if self.ragged and self.per_row:
            raise OptionError(
                "ragged= and per_row=True contradict each other: lists in rows that are episodes have an "
                "item a step; if a step has a list, load the file, and pass its episodes to "
                "rlio.from_episodes"
            )
        if self.valid and not self.per_row:
            raise OptionError("valid= needs per_row=True: it marks the steps of a row that are no padding")
        if self.valid and self.lengths:
            raise OptionError("lengths= and valid= both say which steps are no padding: leave one out")

    def _check_shifted(self, tops: abc.Mapping[str, Any]) -> None:
        """Refuse shifted columns that cannot be; with them, the last row of an episode is a final row."""
        if not self.shifted:
            return
        fixed = {Columns.OBS, Columns.NEXT_OBS, Columns.T}
        if wrong := [name for name in self.shifted if name in fixed or name not in tops]:
            hint = ""
            if {"terminated", "truncated", *self.instead} & {*wrong}:
                hint = "; a flag is not named here: that of the last row is the flag of the step before it"
            raise OptionError(
                f"shifted={excerpt(wrong)}: expected columns of rlio that are mapped, besides obs and t, "
                f"such as ('actions', 'rewards'){hint}"
            )
        if self.next_obs != DERIVE:
            raise OptionError(
                "shifted= needs next_obs='derive': the last row of each episode has its final observation"
            )
        set_options(self, final_row=True)

    def _checked_columns(self) -> dict[str, Spec]:
        columns = self.columns
        if not isinstance(columns, abc.Mapping) or not columns:
            raise OptionError(
                f"columns={excerpt(columns)}: expected a dict of rlio's column -> column of the table"
            )
        for name, spec in columns.items():
            if not isinstance(name, str) or not name:
                raise OptionError(f"columns={{{excerpt(name)}: ...}}: expected the name of a column of rlio")
            if (top := name.partition("/")[0]) in self.instead:
                raise OptionError(f"columns={{{name!r}: ...}}: pass {self.instead[top]}= instead")
            _check_spec(name, spec)
        tops = {name.partition("/")[0] for name in columns}
        for name in columns:
            self._check_meant(name, tops)
        return {name: deepcopy(spec) for name, spec in columns.items()}

    def _check_meant(self, name: str, tops: set[str]) -> None:
        """Refuse another library's name for a column that is not mapped: it would have no meaning."""
        top, slash, part = name.partition("/")
        meant = MEANT.get(top.lower(), ())
        options = {self.instead[column] for column in meant if column in self.instead}
        given = {"episode"} if self.starts or self.lengths or self.ends or self.per_row else set()
        if options and not given & options and not any(getattr(self, option) for option in options):
            raise OptionError(
                f"columns={{{name!r}: ...}}: expected a column of rlio: did you mean "
                f"{' or '.join(sorted(f'{option}=' for option in options))}?"
            )
        if meant and not options and not tops.intersection(meant):
            own = " or ".join(repr(column + slash + part) for column in meant)
            raise OptionError(f"columns={{{name!r}: ...}}: expected a column of rlio: did you mean {own}?")

    def to_json(self) -> dict[str, Any]:
        """What determines the rows and is not the default, as JSON values."""
        # Spaces change no row, and are no JSON.
        return {name: value for name, value in asdict(replace(self, spaces=None)).items() if value}


def _check_spec(name: str, spec: object) -> None:
    """Raise unless ``spec`` is a `Spec`."""
    if isinstance(spec, abc.Mapping) and spec:
        for key, part in spec.items():
            _check_spec(f"{name}.{key}", part)
    elif not isinstance(spec, str) and not (
        isinstance(spec, Sequence) and spec and all(isinstance(part, str) for part in spec)
    ):
        raise OptionError(
            f"{name}={excerpt(spec)}: expected the name of a column, a list of names, or a dict of parts"
        )


def _checked_names(option: str, names: object) -> tuple[str, ...]:
    if names is None or isinstance(names, str):
        return () if names is None else (names,)
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise OptionError(f"{option}={excerpt(names)}: expected the name of a column, or a list of names")
    return tuple(names)


def _checked_codes(codes: object) -> dict[str, tuple[Any, ...] | None]:
    if isinstance(codes, str) or (isinstance(codes, Sequence) and not isinstance(codes, bytes)):
        codes = dict.fromkeys((codes,) if isinstance(codes, str) else codes)
    if not isinstance(codes, abc.Mapping) or not all(isinstance(name, str) and name for name in codes):
        raise OptionError(
            f"codes={excerpt(codes)}: expected a dict of columns -> lists of categories, or names of columns"
        )
    found: dict[str, tuple[Any, ...] | None] = {}
    for name, values in codes.items():
        is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes) and len(values)
        is_plain = is_list and all(type(one) in (str, int, bool) for one in values)
        if values is not None and not (is_plain and len(set(values)) == len(values)):
            raise OptionError(
                f"codes={{{excerpt(name)}: {excerpt(values)}}}: expected a list of texts or whole numbers, "
                "each once, or None"
            )
        found[name] = None if values is None else tuple(values)
    return found


def _checked_dtypes(dtypes: object) -> dict[str, str]:
    if dtypes is not None and not isinstance(dtypes, abc.Mapping):
        raise OptionError(f"dtypes={excerpt(dtypes)}: expected a dict of rlio's column -> dtype")
    for name, dtype in (dtypes or {}).items():
        try:
            np.dtype(dtype)
            is_known = isinstance(name, str) and dtype is not None
        except TypeError:
            is_known = False
        if not is_known:
            raise OptionError(
                f"dtypes={{{excerpt(name)}: {excerpt(dtype)}}}: expected rlio's column -> the name of a "
                "NumPy dtype, such as 'float32'"
            )
    return {
        name: kind if isinstance(kind, str) else np.dtype(kind).name for name, kind in (dtypes or {}).items()
    }


def dotted(name: str) -> str:
    """``obs/position`` as ``obs.position``, which is how a part is named in messages and paths."""
    return name.replace("/", ".")


def nested(columns: abc.Mapping[str, Any]) -> dict[str, Any]:
    """Specs by column: a name such as ``obs/position`` is a part of a nested column.

    Raises:
        OptionError: A column is named with and without parts.
    """
    found: dict[str, Any] = {}
    for name, spec in columns.items():
        top, *parents = name.split("/")
        inner, key = found, top
        for part in parents:
            inner, key = inner.setdefault(key, {}), part
            if not isinstance(inner, dict):
                break
        if not isinstance(inner, dict) or key in inner:
            raise OptionError(
                f"columns={excerpt(list(columns))}: {excerpt(name)} is named, and so is its whole or a part"
            )
        inner[key] = dict(spec) if isinstance(spec, abc.Mapping) else spec
    return found
