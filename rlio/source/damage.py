"""What ``on_error="skip"`` left out: each damaged place once."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from rlio.errors import CorruptData, RlioError, excerpt

__all__ = ["DAMAGE", "Damage", "SkippedRecord", "damage_named"]

#: What decoders raise about damaged or forged bytes, see `damage_named`. Out of memory is not among it, and
#: neither are AttributeError and AssertionError, which our own bugs raise: these pass.
DAMAGE: Final = (
    ArithmeticError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,  # Also RecursionError and NotImplementedError.
    SyntaxError,  # NumPy parses the names of dtypes.
    TypeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
_KEPT_ERRORS: Final = 1000


@contextmanager
def damage_named(format: str, *, uri: str | None, record: int | None = None) -> Iterator[None]:
    """Turn the errors of libraries about damaged bytes into CorruptData: the one place that does.

    It is around each file that is decoded (`rlio.formats.files.inputs.Guard`), each episode and record of a
    layout, and its opening.
    """
    try:
        yield
    except RlioError:
        raise
    except DAMAGE as error:
        # Errors of a library have no errno, unlike errors of the filesystem.
        if getattr(error, "errno", None) is not None:
            raise
        raise CorruptData(
            f"not readable as {format}: {excerpt(str(error) or type(error).__name__)}", uri=uri, record=record
        ) from error


class SkippedRecord(NamedTuple):
    """A damaged record, episode or file that ``on_error="skip"`` skipped."""

    uri: str | None
    record: int | None
    message: str


class Damage:
    """The damaged places that a reader came across.

    Attributes:
        errors: The first 1000.
    """

    def __init__(self) -> None:
        self.errors: list[SkippedRecord] = []
        self._places: dict[tuple[str | None, int | None], None] = {}  # In order.

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._places)

    def add(self, error: RlioError) -> None:
        """Note a damaged place; one that is known already is not counted again."""
        self._add(SkippedRecord(error.uri, error.record, str(error)))

    def _add(self, found: SkippedRecord) -> None:
        place = found.uri, found.record
        if place not in self._places:
            self._places[place] = None
            if len(self.errors) < _KEPT_ERRORS:
                self.errors.append(found)

    def to_json(self) -> list[list[Any]]:
        """The places as JSON, with the messages of the first ones."""
        known = {error[:2]: error.message for error in self.errors}
        return [[*place, known.get(place, "")] for place in self._places]

    def add_json(self, written: Iterable[Any]) -> None:
        """Add what `to_json` returned.

        Raises:
            TypeError, ValueError: ``written`` has another form.
        """
        for uri, record, message in written:
            self._add(SkippedRecord(uri, record, message))
