"""The writers that ship with rlio, found the same way as anybody else's."""

from typing import TYPE_CHECKING

from rlio._lazy import lazy_exports

__all__ = [
    "JsonWriter",
    "NoopOutput",
    "ParquetWriter",
    "Roll",
    "TeeWriter",
]

if __name__ != "rlio.writers":
    raise ImportError(
        f"this package was imported as {__name__!r}; it is installed as 'rlio.writers': "
        "write 'import rlio.writers' and keep the checkout's root off sys.path"
    )

if TYPE_CHECKING:
    from rlio.writers.json_writer import JsonWriter
    from rlio.writers.noop_output import NoopOutput
    from rlio.writers.parquet_writer import ParquetWriter
    from rlio.writers.roll import Roll
    from rlio.writers.tee_writer import TeeWriter
else:
    # Hidden from type checkers: to them a module with __getattr__ has every attribute.
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "JsonWriter": "rlio.writers.json_writer",
            "NoopOutput": "rlio.writers.noop_output",
            "ParquetWriter": "rlio.writers.parquet_writer",
            "Roll": "rlio.writers.roll",
            "TeeWriter": "rlio.writers.tee_writer",
        },
    )
