"""The storage layer: a folder on any filesystem, as the few operations that the format is built on.

What objects are called and what their bytes mean is not known here.

Example:
    >>> from rlio.storage import Storage
    >>> storage = Storage.open("memory://package-example")
    >>> storage.put("folder/name", b"rows")
    >>> [entry.path for entry in storage.list()]
    ['folder/name']
"""

from rlio.storage.filesystem import Entry, InputFile, Retry, Storage, expand_inputs, open_input

__all__ = ["Entry", "InputFile", "Retry", "Storage", "expand_inputs", "open_input"]
