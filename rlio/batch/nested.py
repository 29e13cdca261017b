"""Nested columns: dicts and tuples of arrays, walked leaf by leaf.

A value is nested if it is a ``dict`` with str keys or a ``tuple``; anything else, including a list, is a
leaf. A leaf's path is the tuple of keys (str) and positions (int) that lead to it; the path of a plain array
is ``()``.

Example:
    >>> column = {"position": 1, "camera": (2, 3)}
    >>> map_structure(lambda leaf: leaf * 10, column)
    {'position': 10, 'camera': (20, 30)}
    >>> leaves(column)
    [(('position',), 1), (('camera', 0), 2), (('camera', 1), 3)]
    >>> unflatten(*zip(*leaves(column)))
    {'position': 1, 'camera': (2, 3)}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from rlio.errors import SchemaError

__all__ = ["Path", "leaves", "map_structure", "path_text", "rebuilt", "unflatten"]

Path: TypeAlias = tuple[str | int, ...]

# Values are Any throughout: a leaf may be an array, a tensor, a spec, or anything else in a column.


def map_structure(fn: Callable[..., Any], *values: Any) -> Any:
    """Apply ``fn`` to the corresponding leaves of ``values``.

    Args:
        fn: Takes one leaf of each value.
        values: One or more values of the same structure.

    Returns:
        The structure of the first value, in fresh dicts and tuples, with the results of ``fn``.

    Raises:
        SchemaError: The structures differ; the message says where.
    """
    return _map(fn, values, ())


def _map(fn: Callable[..., Any], values: tuple[Any, ...], path: Path) -> Any:
    first = values[0]
    if not isinstance(first, dict | tuple):
        for other in values[1:]:
            if isinstance(other, dict | tuple):
                raise _unlike(first, other, path)
        return fn(*values)
    if isinstance(first, dict):
        for other in values[1:]:
            if not isinstance(other, dict) or other.keys() != first.keys():
                raise _unlike(first, other, path)
        return {key: _map(fn, tuple(v[key] for v in values), (*path, key)) for key in first}
    for other in values[1:]:
        if not isinstance(other, tuple) or len(other) != len(first):
            raise _unlike(first, other, path)
    return tuple(_map(fn, parts, (*path, i)) for i, parts in enumerate(zip(*values, strict=True)))


def _unlike(first: Any, other: Any, path: Path) -> SchemaError:
    place = f"at {path_text(path)}" if path else "at the top"
    return SchemaError(
        f"nested values differ {place}: one is {_shape_text(first)}, another is {_shape_text(other)}; "
        "give all of them the same dict keys and tuple lengths"
    )


def _shape_text(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict of {sorted(map(str, value))}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a leaf ({type(value).__name__})"


def path_text(path: Path) -> str:
    """``path`` for messages: ``camera/0``."""
    return "/".join(map(str, path))


def leaves(value: Any) -> list[tuple[Path, Any]]:
    """The leaves of ``value`` with their paths, dicts in their own order; ``[((), value)]`` for a leaf."""
    if not isinstance(value, dict | tuple):
        return [((), value)]
    found: list[tuple[Path, Any]] = []
    _collect(value, (), found)
    return found


def _collect(value: Any, path: Path, found: list[tuple[Path, Any]]) -> None:
    if isinstance(value, dict):
        for key, part in value.items():
            _collect(part, (*path, key), found)
    elif isinstance(value, tuple):
        for i, part in enumerate(value):
            _collect(part, (*path, i), found)
    else:
        found.append((path, value))


def unflatten(paths: Iterable[Path], leaves: Iterable[Any]) -> Any:
    """Build the nested value that has ``leaves`` at ``paths``: the inverse of `leaves`.

    A str makes a dict. An int makes a tuple, whose positions must be 0, 1, ... . Dicts keep the order in
    which their keys first appear. Empty dicts and tuples have no leaves and are not rebuilt; no paths give
    ``{}``.

    Raises:
        SchemaError: The paths contradict each other: one leads through a leaf, keys and positions are mixed,
            a path occurs twice, or a position is missing.
    """
    tree: dict[str | int, Any] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if any(isinstance(part, bool) or not isinstance(part, str | int) for part in path):
            raise SchemaError(f"path {path!r}: its parts are str keys and int positions")
        node = tree
        # The whole value hangs under one artificial key, so a plain leaf (path ()) is not a special case.
        for parent, key in zip(("", *path), path, strict=False):
            node = node.setdefault(parent, _Branch())
            if not isinstance(node, _Branch):
                raise SchemaError(f"path {path_text(path)} leads through a leaf before {key!r}")
        last = path[-1] if path else ""
        if last in node:
            raise SchemaError(f"path {path_text(path)!r} is given twice, or is also the start of another")
        node[last] = leaf
    return _build(tree[""], ()) if tree else {}


def rebuilt(paths: tuple[Path, ...], leaves: Sequence[Any]) -> Any:
    """`unflatten` of paths that many values have, with parts of exactly the types str and int.

    The structure is computed once: a column of infos has twenty leaves, and every batch builds it.

    Raises:
        SchemaError: As in `unflatten`.
    """
    return _filled(_numbered(paths), leaves)


@lru_cache(maxsize=512)
def _numbered(paths: tuple[Path, ...]) -> Any:
    """The nested value whose leaves are the numbers of their paths."""
    return unflatten(paths, range(len(paths)))


def _filled(numbers: Any, leaves: Sequence[Any]) -> Any:
    if type(numbers) is int:
        return leaves[numbers]
    if type(numbers) is tuple:
        return tuple([_filled(part, leaves) for part in numbers])
    return {
        key: leaves[part] if type(part) is int else _filled(part, leaves) for key, part in numbers.items()
    }


class _Branch(dict[str | int, Any]):
    """An inner node of a value being built; its type distinguishes it from a leaf that is a dict."""


def _build(node: Any, path: Path) -> Any:
    if not isinstance(node, _Branch):
        return node
    if all(isinstance(key, str) for key in node):
        return {key: _build(part, (*path, key)) for key, part in node.items()}
    if set(node) != set(range(len(node))):
        raise SchemaError(
            f"paths under {path_text(path)!r} have the parts {sorted(map(str, node))}: "
            "expected only str keys, or the positions 0, 1, ... without a gap"
        )
    return tuple(_build(node[i], (*path, i)) for i in range(len(node)))
