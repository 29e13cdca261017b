"""JSON lines: one object a line, which is one step. Lists are arrays, and objects are nested columns.

`rlio.JsonReader` reads RLlib's JSON, which has batches or RLlib's columns. It opens such files unless a
mapping is given.
"""

from __future__ import annotations

import io
import re
from codecs import BOM_UTF8
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from rlio.errors import CorruptData, UnsafeData
from rlio.formats.files.json_files import first_keys, list_of_records
from rlio.formats.format import Format, Marks
from rlio.formats.tables.text_table import TextTable
from rlio.mapping import Mapping

FORMAT = Format(
    name="jsonl",
    title="JSON lines",
    marks=Marks(endings=(".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")),
    table="rlio.formats.tables.jsonl:JsonlTable",
    advice="read it with rlio.read and a mapping (docs/mapping.md)",
    about="One object a step, by a mapping. Without one, rlio.JsonReader reads such files.",
)

_KEY: Final = re.compile(rb'"([^"]*+)"\s*:')
_NULL: Final = re.compile(rb"[ \t\r\n]*+null")
_DEEPEST: Final = 64
# What each byte adds to the depth.
_DEPTH: Final = np.zeros(256, np.int8)
_DEPTH[[ord("["), ord("{")]], _DEPTH[[ord("]"), ord("}")]] = 1, -1
_ESCAPE: Final = re.compile(rb"\\.", re.DOTALL)
# Columns times rows of a block may be this many times its bytes: each column takes room in every row.
_CELLS_PER_BYTE: Final = 16


class JsonlTable(TextTable):
    """Files of JSON lines; a `Table`."""

    title = "JSON lines"

    def arranged(self, mapping: Mapping) -> Mapping:
        """Ids that look like times are texts: a time has several spellings; see `Table`."""
        import pyarrow as pa

        ids = {*(mapping.episode or ())}
        self._read_as_text([f.name for f in self._schema if f.name in ids and pa.types.is_temporal(f.type)])
        return mapping

    def parse(self, text: bytes, file: int, names: Sequence[str] | None, schema: Any) -> Any:
        """See `TextTable`."""
        import pyarrow as pa
        from pyarrow import json

        text = text.removeprefix(BOM_UTF8)
        if _NULL.match(text):  # pyarrow crashes.
            raise CorruptData("a line is null: expected an object in each line")
        if names is None:
            # pyarrow would take one row of the wrong names from a list, or call it damage.
            if text.lstrip()[:1] == b"[":
                raise list_of_records(first_keys(text))
            self._check(text)
        explicit = None if schema is None else pa.schema([schema.field(name) for name in names or ()])
        return json.read_json(
            io.BytesIO(text),
            read_options=json.ReadOptions(use_threads=False, block_size=len(text) + 1),
            parse_options=json.ParseOptions(
                explicit_schema=explicit,
                unexpected_field_behavior="infer" if explicit is None else "ignore",
            ),
        )

    def _check(self, text: bytes) -> None:
        """Refuse a block that needs many times its size in memory: deep nesting, or sparse columns."""
        if b"\\" in text:  # So that each quote begins or ends a text.
            text = _ESCAPE.sub(b"..", text)
        raw = np.frombuffer(text, np.uint8)
        line_ends, quotes = (np.flatnonzero(raw == ord(one)) for one in ("\n", '"'))
        places = np.flatnonzero(_DEPTH[raw])
        places = places[np.searchsorted(quotes, places) % 2 == 0]  # Brackets in texts have no meaning.
        depth = np.concatenate([[0], np.cumsum(_DEPTH[raw[places]], dtype=np.int64)])
        # Relative to where the line begins: brackets of a damaged line need not be balanced.
        begins = np.searchsorted(places, np.concatenate([[0], line_ends + 1]))
        base = np.repeat(depth[begins], np.diff(begins, append=len(places)))
        if (depth[1:] - base).max(initial=0) > _DEEPEST:
            raise UnsafeData(f"JSON nested more than {_DEEPEST} deep")
        columns = len(set(_KEY.findall(text)))
        if columns > self.limits.columns or columns * len(line_ends) > _CELLS_PER_BYTE * max(
            len(text), 1 << 16
        ):
            raise UnsafeData(
                f"{columns} keys in {len(line_ends)} lines of {len(text)} bytes: more than steps have"
            )
