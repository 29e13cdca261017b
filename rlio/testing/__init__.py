"""Tests for plug-in authors: conformance suites, and filesystems that fail on purpose.

A suite is a class to subclass in a test file. It needs pytest, which rlio itself does not need.

Example:
    >>> from rlio.testing import FileSystemTests
    >>> FileSystemTests.__module__
    'rlio.testing.filesystem'
"""

from rlio.support.lazy import lazy_exports

# The names and their homes are stated once, in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
