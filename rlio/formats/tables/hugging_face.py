"""Hugging Face: folders of `Dataset.save_to_disk` and `DatasetDict.save_to_disk`, one row a step.

Such a folder has ``state.json``, which names its Arrow files; one of several splits has
``dataset_dict.json``, and a folder for each. The files are one table in pieces: an episode may go on in
the next file.
"""

from __future__ import annotations

import re

from rlio.errors import CorruptData, OptionError, UnknownLayout, excerpt
from rlio.formats.files.json_files import read_object
from rlio.formats.format import Format, Marks, with_all_of
from rlio.formats.place import Place
from rlio.formats.tables.arrow import ArrowTable
from rlio.limits import Limits

_IS_MARKED = with_all_of(
    {"_data_files", "_fingerprint"},
    {"builder_name", "dataset_size", "features"},
    {"citation", "description", "features", "homepage", "license"},
)

FORMAT = Format(
    name="huggingface",
    title="Hugging Face datasets",
    marks=Marks(
        json=lambda found: (
            _IS_MARKED(found) or (found.keys() == {"splits"} and isinstance(found["splits"], list))
        ),
    ),
    source="rlio.formats.tables.hugging_face:saved_table",
    table="rlio.formats.tables.hugging_face:saved_table",
    root=("state.json", "dataset_dict.json"),
    about="Columns by rlio's names, or by a mapping (docs/mapping.md).",
)


def saved_table(place: Place, *, limits: Limits, split: str | None = None) -> ArrowTable:
    """The `Table` of a folder of `save_to_disk`.

    Args:
        place: The folder.
        limits: Bounds on the files.
        split: Name of the split; None: there is only one.

    Raises:
        OptionError: There is no such split; or there are several, and ``split`` is None.
        UnknownLayout: The rows are chosen by stored indices, as datasets before 2.0 left them.
        CorruptData: The folder is damaged.
    """
    root, folder = place.root(), ""
    if root.exists("dataset_dict.json"):
        splits = read_object(root, "dataset_dict.json", limits=limits).get("splits")
        if not isinstance(splits, list) or not all(map(_is_name, splits)):
            raise CorruptData(f"found the splits {excerpt(splits)}, expected names", uri=place.uri)
        if split is None and len(splits) == 1:
            split = splits[0]
        if split not in splits:
            raise OptionError(
                f"split={excerpt(split)}: the data set has {excerpt(sorted(splits))}, pass "
                "format_options={'split': ...} with one of them",
                uri=place.uri,
            )
        folder = f"{split}/"
    elif split is not None:
        raise OptionError(f"split={excerpt(split)}: the folder has no splits", uri=place.uri)
    state = read_object(root, f"{folder}state.json", limits=limits)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise UnknownLayout(
            "found a data set whose rows are chosen by stored indices: save dataset.flatten_indices()",
            uri=place.uri,
        )
    entries = state.get("_data_files")
    names = [isinstance(entry, dict) and entry.get("filename") for entry in entries or ()]
    if not names or not all(map(_is_name, names)):
        raise CorruptData(f"state.json names the files {excerpt(names)}, expected names", uri=place.uri)
    files = Place(place.uri, None, tuple(place.file(f"{folder}{name}") for name in names))
    table = ArrowTable(files, limits=limits)
    table.continues = True
    return table


def _is_name(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[\w.-]+", name) is not None and set(name) != {"."}
