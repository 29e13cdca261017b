"""The readers that ship with rlio, found the same way as anybody else's."""

from typing import TYPE_CHECKING

from rlio._lazy import lazy_exports

__all__ = [
    "D4RLReader",
    "DatasetReader",
    "ForeignParquetReader",
    "JsonReader",
    "MappedInput",
    "MixedInput",
    "RecordingInput",
    "SamplerInput",
    "ShuffledInput",
]

if __name__ != "rlio.readers":
    raise ImportError(
        f"this package was imported as {__name__!r}; it is installed as 'rlio.readers': "
        "write 'import rlio.readers' and keep the checkout's root off sys.path"
    )

if TYPE_CHECKING:
    from rlio.readers.d4rl_reader import D4RLReader
    from rlio.readers.dataset_reader import DatasetReader
    from rlio.readers.foreign_parquet import ForeignParquetReader
    from rlio.readers.json_reader import JsonReader
    from rlio.readers.mapped_input import MappedInput
    from rlio.readers.mixed_input import MixedInput
    from rlio.readers.recording_input import RecordingInput
    from rlio.readers.sampler_input import SamplerInput
    from rlio.readers.shuffled_input import ShuffledInput
else:
    # Hidden from type checkers: to them a module with __getattr__ has every attribute.
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "D4RLReader": "rlio.readers.d4rl_reader",
            "DatasetReader": "rlio.readers.dataset_reader",
            "ForeignParquetReader": "rlio.readers.foreign_parquet",
            "JsonReader": "rlio.readers.json_reader",
            "MappedInput": "rlio.readers.mapped_input",
            "MixedInput": "rlio.readers.mixed_input",
            "RecordingInput": "rlio.readers.recording_input",
            "SamplerInput": "rlio.readers.sampler_input",
            "ShuffledInput": "rlio.readers.shuffled_input",
        },
    )
