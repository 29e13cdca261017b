"""What plug-in authors test with: conformance suites, and tools that make storage fail on purpose.

A suite is a class to subclass in a test file; it needs pytest, which rlio itself does not.

Example:
    >>> from rlio.testing import FileSystemTests
    >>> FileSystemTests.__module__
    'rlio.testing.filesystem'
"""

from typing import TYPE_CHECKING

from rlio._lazy import lazy_exports

__all__ = [
    "FaultyFileSystem",
    "FaultyRenamingFileSystem",
    "FileSystemTests",
    "ReaderTests",
    "WriterTests",
    "assert_resumes",
    "assert_same",
]

if TYPE_CHECKING:
    from rlio.testing.filesystem import FaultyFileSystem, FaultyRenamingFileSystem, FileSystemTests
    from rlio.testing.readers import ReaderTests, assert_resumes, assert_same
    from rlio.testing.writers import WriterTests
else:
    # Hidden from type checkers: to them a module with __getattr__ has every attribute.
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "FaultyFileSystem": "rlio.testing.filesystem",
            "FaultyRenamingFileSystem": "rlio.testing.filesystem",
            "FileSystemTests": "rlio.testing.filesystem",
            "ReaderTests": "rlio.testing.readers",
            "WriterTests": "rlio.testing.writers",
            "assert_resumes": "rlio.testing.readers",
            "assert_same": "rlio.testing.readers",
        },
    )
