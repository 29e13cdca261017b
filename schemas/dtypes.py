"""NumPy dtypes from untrusted texts, and of Arrow's numbers.

`np.dtype` accepts a small language, and evaluates parts of it: ``np.dtype("<,")`` raises a SyntaxError, and
``"3f4,i8"`` is a structure. The format stores only a dtype's ``str``.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final

import numpy as np

__all__ = ["is_stored", "numpy_type", "stored_dtype"]

#: What Arrow calls its numbers.
_NUMBERS: Final[dict[str, np.dtype[Any]]] = {
    **{kind: np.dtype(kind) for kind in ("bool", "int8", "int16", "int32", "int64")},
    **{kind: np.dtype(kind) for kind in ("uint8", "uint16", "uint32", "uint64")},
    "halffloat": np.dtype("f2"),
    "float": np.dtype("f4"),
    "double": np.dtype("f8"),
}
_PLAIN: Final = re.compile(r"[<>|=]?(?:[?biufcSUO][0-9]{0,9}|[mM]8(?:\[[0-9]{0,9}[a-zA-Z]{1,2}\])?)")


def stored_dtype(text: object) -> np.dtype[Any]:
    """Return the dtype whose ``str`` is ``text``; it has no fields.

    Raises:
        ValueError: ``text`` is not such a dtype.
    """
    if not isinstance(text, str) or not _PLAIN.fullmatch(text):
        raise ValueError(f"not a dtype: {text!r:.100}")
    try:
        return np.dtype(text)
    except TypeError as error:
        raise ValueError(f"not a dtype: {text!r:.100}") from error


@lru_cache(maxsize=256)
def is_stored(dtype: np.dtype[Any]) -> bool:
    """Whether the ``str`` of ``dtype`` gives it back: not so for fields and dtypes of other libraries."""
    try:
        return stored_dtype(dtype.str) == dtype
    except ValueError:
        return False


def numpy_type(kind: Any) -> np.dtype[Any]:
    """The dtype of the values of a type of Arrow. In pyarrow 17, its own method needs pandas.

    Raises:
        NotImplementedError: NumPy has none.
    """
    found = _NUMBERS.get(str(kind))
    return np.dtype(kind.to_pandas_dtype()) if found is None else found
