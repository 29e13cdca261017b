"""The proof of a conversion: both sides are read again, and compared with what was handed to the target.

    source  ──decoded through its `Source`──►  rows  ═══ equal, but for the decisions ═══╗
    prepared episodes, digested on their way into the target  ◄══════════════════════════╣
    target  ──opened as any data──►  rows  ═══════════ equal ════════════════════════════╝

The side of the source is decoded here, by the rows of its `rlio.source.source.Source`. It takes nothing from
`rlio.conversion.prepare` but the list of decisions: what they name is left out of the comparison, or done
here again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, SampleBatch
from rlio.batch.arrays import equal_columns, take_leaf, to_numpy
from rlio.batch.columns import Columns
from rlio.batch.encoded_picture import is_encoded, row_type
from rlio.batch.nested import leaves, map_structure, path_text
from rlio.batch.picture_codecs import decode_column
from rlio.conversion.episodes import Episodes
from rlio.conversion.prepare import Decisions
from rlio.errors import CorruptData, SchemaError
from rlio.formats.format import Holds
from rlio.formats.sink import PreparedEpisode

__all__ = [
    "Digests",
    "RowDigests",
    "digests_of_episode",
    "digests_of_rows",
    "in_order",
    "prove_episodes",
    "prove_joint",
]

#: Column -> digest of its structure, dtypes, shapes and values.
Digests: TypeAlias = dict[str, bytes]
#: (column, key, ...) -> array.
_Leaves: TypeAlias = dict[tuple[Any, ...], NDArray[Any]]

_EVERYTHING = Holds()
# After the name of a column: the digest of the files of the encoded pictures of a leaf. That of the column
# itself is of their frames, so that both are compared, and files with frames, or with frames of videos.
_FILES: Final = "\0files"
# Pictures that are decoded at once.
_PICTURES: Final = 64


def prove_episodes(
    source: Episodes,
    written: Episodes,
    prepared: Iterable[Digests],
    decisions: Decisions | None,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Compare both sides with the episodes that were handed to the target.

    Args:
        source: What was converted.
        written: The target, opened again.
        prepared: The digests of the episodes that were written, in order.
        decisions: How they differ from those of the source; None: in nothing, and rows are compared.
        progress: Called after each episode with the rows and the episodes of the source that were compared.

    Raises:
        CorruptData: A column of an episode differs, or one side has more episodes.
    """
    refused = set() if decisions is None else decisions.refused
    expected = iter(prepared)
    given = ((number, rows) for number, (_, rows) in enumerate(source.decoded()) if number not in refused)
    found, done = iter(written), 0
    for count, (number, rows) in enumerate(given):
        assert isinstance(rows, SampleBatch)
        handed, target = next(expected, None), next(found, None)
        if handed is None or target is None:
            raise _failure(f"the source has more than {count} episodes", written.uri, count)
        assert isinstance(target[1], SampleBatch)
        if decisions is None:
            originals, stored = digests_of_rows(rows), digests_of_rows(target[1])
        else:
            originals = _original(rows, number, decisions)
            stored = _digests(_of_episode(target[1], number, decisions.holds), decisions.holds)
        _compare(
            f"episode {count}: between source and written episode", originals, handed, written.uri, count
        )
        _compare(f"episode {count}", handed, stored, written.uri, count)
        done += len(rows)
        if progress is not None:
            progress(done, count + 1)
    if next(chain(expected, found), None) is not None:
        raise _failure("the target has more episodes than the source", written.uri, None)


def prove_joint(
    source: Episodes,
    written: Episodes,
    prepared: RowDigests,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """As `prove_episodes`, of all rows of each policy, however they are cut into batches.

    ``progress`` is called with the rows of both sides, one after the other.
    """
    done = 0
    for what, side in (("between source and written rows", source.decoded()), ("all rows", iter(written))):
        found = RowDigests()
        for _, batch in side:
            found.add(batch)
            done += batch.agent_steps()
            if progress is not None:
                progress(done, 0)
        _compare(what, prepared.digests(), found.digests(), written.uri, None)


def _failure(what: str, uri: str, record: int | None, column: str | None = None) -> CorruptData:
    return CorruptData(f"the proof failed: {what}", uri=uri, record=record, column=column)


def _compare(what: str, a: Mapping[str, bytes], b: Mapping[str, bytes], uri: str, record: int | None) -> None:
    for column in [*a, *b]:
        if _FILES in column and not (column in a and column in b):
            continue  # One side has the frames, or files of another kind.
        if a.get(column) != b.get(column):
            lacks = "is absent" if column not in b else "is new" if column not in a else "differs"
            raise _failure(f"{what}: the column {lacks}", uri, record, column.partition(_FILES)[0])


# ---- what is compared ----


def digests_of_rows(rows: SampleBatch) -> Digests:
    """The digests of all columns of an episode's rows."""
    return _digests(_leaves_of(in_order(rows)), _EVERYTHING)


def digests_of_episode(episode: PreparedEpisode, holds: Holds) -> Digests:
    """The digests of what a sink is given."""
    return _digests(_of_prepared(episode), holds)


def _of_prepared(episode: PreparedEpisode) -> _Leaves:
    columns = {Columns.OBS: episode.obs, Columns.ACTIONS: episode.actions}
    if episode.has_final_observation:
        columns[Columns.NEXT_OBS] = map_structure(lambda leaf: leaf[-1:], episode.observations)
    if episode.rewards is not None:
        columns[Columns.REWARDS] = episode.rewards
    if episode.infos is not None:
        columns[Columns.INFOS] = episode.infos
    columns |= {
        Columns.TERMINATEDS: np.array([episode.terminated]),
        Columns.TRUNCATEDS: np.array([episode.truncated]),
        Columns.EPS_ID: np.array([episode.id_], object),
        Columns.T: np.array([episode.t_started]),
        **episode.extra_outputs,
    }
    return _leaves_of(columns)


def _of_episode(rows: SampleBatch, number: int, holds: Holds) -> _Leaves:
    """The same of rows: observations, the final one, and a value an episode of what is constant in it.

    Raises:
        SchemaError: The rows are not a trajectory.
    """
    rows = in_order(rows)
    last = slice(len(rows) - 1, None)
    valid = _flag(rows, Columns.NEXT_OBS_VALID, absent=Columns.NEXT_OBS in rows)
    columns: dict[str, Any] = dict(rows)
    columns.pop(Columns.NEXT_OBS_VALID, None)
    after = columns.pop(Columns.NEXT_OBS, None)
    if after is not None:
        here = map_structure(lambda leaf: to_numpy(leaf)[:-1][valid[:-1]], after)
        there = map_structure(lambda leaf: to_numpy(leaf)[1:][valid[:-1]], rows[Columns.OBS])
        if not equal_columns(here, there):
            raise SchemaError("a new_obs is not the obs of the next row", column=Columns.NEXT_OBS)
        if valid[-1] and holds.final_obs != "lost":
            columns[Columns.NEXT_OBS] = map_structure(lambda leaf: to_numpy(leaf)[last], after)
    for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS):
        columns[name] = _flag(rows, name, absent=False)[last]
    ids, steps = rows.get(Columns.EPS_ID), rows.get(Columns.T)
    known = number if ids is None or holds.ids == "none" else to_numpy(ids).item(0)
    columns[Columns.EPS_ID] = np.array([str(known) if holds.ids == "text" else known], object)
    columns[Columns.T] = np.array([0 if steps is None or not holds.start else int(to_numpy(steps)[0])])
    return _leaves_of(columns)


def _original(rows: SampleBatch, number: int, decisions: Decisions) -> Digests:
    """The digests of an episode of the source, after what was decided on purpose."""
    found = _of_episode(rows, number, decisions.holds)
    count = len(rows)
    if number in decisions.shortened:
        found = _shortened(found, count)
    if number in decisions.repeated:
        if any(path[0] == Columns.NEXT_OBS for path in found):
            raise CorruptData(
                "the proof failed: a final observation that is known was replaced", record=number
            )
        last = {path: leaf[-1:] for path, leaf in found.items() if path[0] == Columns.OBS}
        found |= {(Columns.NEXT_OBS, *path[1:]): leaf for path, leaf in last.items()}
    terminated = bool(found[Columns.TERMINATEDS,][0])
    truncated = bool(found[Columns.TRUNCATEDS,][0])
    if decisions.holds.ends == "none":
        found[Columns.TERMINATEDS,] = np.array([True])
    ended = {
        "none": False,
        "all": truncated,
        "closed": truncated or not terminated,
        "either": not terminated,
        "terminated": False,
    }[decisions.holds.ends]
    found[Columns.TRUNCATEDS,] = np.array([ended])
    changed: _Leaves = {}
    for path, leaf in found.items():
        if path[0] in decisions.left_out:
            continue
        if path[0] == Columns.REWARDS:
            leaf = leaf.reshape(len(leaf), -1)[:, 0] if leaf[:1].size == 1 else leaf
        if path[0] in decisions.floats and leaf.dtype.kind in "iu":
            floats = leaf.astype(np.float64)
            leaf = floats if np.array_equal(floats.astype(leaf.dtype), leaf) else leaf
        changed[_renamed(path, decisions)] = leaf
    return _digests(changed, decisions.holds)


def _shortened(found: _Leaves, count: int) -> _Leaves:
    """An episode without its last step, whose observation is then the final one."""
    cut = {path: leaf[: count - 1] if len(leaf) == count else leaf for path, leaf in found.items()}
    cut |= {
        (Columns.NEXT_OBS, *path[1:]): leaf[-1:] for path, leaf in found.items() if path[0] == Columns.OBS
    }
    return {**cut, (Columns.TERMINATEDS,): np.array([False]), (Columns.TRUNCATEDS,): np.array([True])}


def _renamed(path: tuple[Any, ...], decisions: Decisions) -> tuple[Any, ...]:
    """Where a leaf of the source is in the target."""
    # The final observation has the keys of the others.
    column = Columns.OBS if path[0] == Columns.NEXT_OBS else path[0]
    known = (column, *path[1:])
    named = [decisions.renamed.get(known[: depth + 1], known)[depth] for depth in range(len(known))]
    if column in decisions.unnested:
        del named[1]
    return (path[0] if column != path[0] else named[0], *named[1:])


def _flag(rows: SampleBatch, name: str, *, absent: bool) -> NDArray[np.bool_]:
    return to_numpy(rows[name]).astype(np.bool_) if name in rows else np.full(len(rows), absent)


def _leaves_of(columns: Mapping[str, Any]) -> _Leaves:
    return {
        (name, *path): to_numpy(leaf) for name, column in columns.items() for path, leaf in leaves(column)
    }


def in_order(rows: SampleBatch) -> SampleBatch:
    """The rows of an episode, sorted by step if each comes once."""
    if Columns.T not in rows:
        return rows
    t = to_numpy(rows[Columns.T])
    if (np.diff(t) == 1).all() or len(np.unique(t)) < len(t):
        return rows
    order = np.argsort(t, kind="stable")
    if (np.diff(order) == 1).all():
        return rows
    return SampleBatch(
        {name: map_structure(lambda leaf: take_leaf(leaf, order), column) for name, column in rows.items()}
    )


# ---- digests ----


class RowDigests:
    """The content of all rows of each policy, however they are cut into batches."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def add(self, batch: Batch) -> None:
        """Add rows."""
        for policy, rows in batch.policies().items():
            for path, array in _leaves_of(rows).items():
                key = f"{policy}/{path_text(path)}"
                if key not in self._found:
                    dtype, shape = row_type(array)
                    self._found[key] = hashlib.blake2b(f"{dtype.str}{shape}".encode())
                _feed_rows(self._found[key], array)
                if is_encoded(array):
                    _feed_files(
                        self._found.setdefault(_key_of_files(key, (), array), hashlib.blake2b()), array
                    )

    def digests(self) -> Digests:
        """Column of a policy -> digest."""
        return {key: digest.digest() for key, digest in self._found.items()}


def _digests(found: _Leaves, holds: Holds) -> Digests:
    """The digest of each column."""
    made: dict[str, Any] = {}
    # Keys of a dict have no order.
    for path in sorted(found, key=lambda path: [str(key) for key in path]):
        array = found[path]
        if path == (Columns.ENV_SEED,) and (array == -1).all():
            continue  # No seed, which is the same as no column.
        if path[0] not in made:
            made[path[0]] = hashlib.blake2b(digest_size=16)
        _feed_column(made[path[0]], path[1:], array, holds)
        if is_encoded(array):
            files = made.setdefault(_key_of_files(path[0], path[1:], array), hashlib.blake2b(digest_size=16))
            _feed_files(files, array)
    # In the order of the columns, for messages.
    order = {path[0]: number for number, path in enumerate(found)}
    names = sorted(made, key=lambda name: order[name.partition(_FILES)[0]])
    return {name: made[name].digest() for name in names}


def _key_of_files(column: str, path: tuple[Any, ...], array: NDArray[Any]) -> str:
    return f"{column}{_FILES}{path!r}" + (" of videos" if array[0].codec == "video" else "")


def _feed_column(digest: Any, path: tuple[Any, ...], array: NDArray[Any], holds: Holds) -> None:
    """Add a leaf: where it is, its dtype, shape and values."""
    if is_encoded(array):
        dtype, shape = row_type(array)
        kind = dtype.str if holds.dtypes else np.dtype(np.float64).str
        digest.update(f"{path!r}|{kind}|{(len(array), *shape)}".encode())
        _feed_rows(digest, array, by_value=not holds.dtypes)
        return
    if not holds.row_shape and array.ndim > 1 and array[0:1].size == 1:
        array = array.reshape(len(array))
    if array.dtype.kind == "U":  # Texts of a fixed width.
        array = array.astype(object)
    if not holds.dtypes and array.dtype.kind in "biuf":
        array = _without_dtype(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("="))
    digest.update(f"{path!r}|{array.dtype.str}|{array.shape}".encode())
    _feed_rows(digest, array, by_value=not holds.dtypes)


def _feed_rows(digest: Any, array: NDArray[Any], *, by_value: bool = False) -> None:
    """Add the rows of an array, which may be cut anywhere."""
    if is_encoded(array):
        for start in range(0, len(array), _PICTURES):
            frames: NDArray[Any] = decode_column(array[start : start + _PICTURES])
            digest.update((_without_dtype(frames) if by_value else frames).tobytes())
    elif array.dtype == object:
        for value in array.tolist():
            _feed(digest, value, by_value=by_value)
    else:
        digest.update(array.tobytes())


def _feed_files(digest: Any, array: NDArray[Any]) -> None:
    """Add the files of encoded pictures."""
    for picture in array.tolist():
        digest.update(f"{picture.codec}{len(picture.data)}".encode())
        digest.update(picture.data)


def _without_dtype(array: NDArray[Any]) -> NDArray[Any]:
    """The values as float64, or as objects if float64 does not hold the whole numbers."""
    wide = array.astype(np.float64)
    with np.errstate(invalid="ignore"):
        is_exact = array.dtype.kind not in "iu" or np.array_equal(wide.astype(array.dtype), array)
    return wide if is_exact else array.astype(object)


def _feed(digest: Any, value: Any, *, by_value: bool = False) -> None:
    """Add a Python value, such as an info; ``by_value``: arrays and NumPy's numbers without their dtypes."""
    if isinstance(value, Mapping):
        digest.update(f"{{{len(value)}".encode())
        for key in sorted(value, key=str):
            digest.update(f"{str(key)!r}:".encode())
            _feed(digest, value[key], by_value=by_value)
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}".encode())
        for one in value:
            _feed(digest, one, by_value=by_value)
    elif isinstance(value, np.ndarray):
        if not by_value:
            kind = value.dtype.newbyteorder("=").str  # The order of bytes is no matter of content.
            digest.update(f"{kind}{value.shape}".encode())
        _feed(digest, value.tolist(), by_value=by_value)
    else:
        # np.float64 and np.str_ are Python's types, too, and are stored as such.
        is_plain = by_value or isinstance(value, (float, complex, str, bytes))
        kind = value.dtype.str if isinstance(value, np.generic) and not is_plain else ""
        plain = value.item() if isinstance(value, np.generic) else value
        digest.update(f"{kind}{plain!r},".encode())
