"""The storage layer: a folder on any filesystem, with the few operations on which the format is built.

This layer knows neither what objects are called nor what their bytes mean.

Example:
    >>> from rlio.storage import Storage
    >>> storage = Storage.open("memory://package-example")
    >>> storage.put("folder/name", b"rows")
    >>> [entry.path for entry in storage.list()]
    ['folder/name']
"""

from rlio.storage.filesystem import Entry, InputFile, Retry, Storage, expand_inputs, open_input
from rlio.storage.input_files import InputFiles, Span, each_file

__all__ = [
    "Entry",
    "InputFile",
    "InputFiles",
    "Retry",
    "Span",
    "Storage",
    "each_file",
    "expand_inputs",
    "open_input",
]
