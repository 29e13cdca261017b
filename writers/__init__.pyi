from .json_writer import JsonWriter as JsonWriter
from .noop_output import NoopOutput as NoopOutput
from .parquet_writer import ParquetWriter as ParquetWriter
from .roll import Roll as Roll
from .tee_writer import TeeWriter as TeeWriter
