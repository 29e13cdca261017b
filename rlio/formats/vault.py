"""Flashbax Vaults: zarr arrays in one OCDBT store."""

from rlio.formats.format import Format, Marks
from rlio.formats.unread import WRITE_BATCHES

FORMAT = Format(
    name="vault",
    title="Flashbax Vault",
    marks=Marks(json=(frozenset(("structure_shape", "structure_dtype")),)),
    advice=WRITE_BATCHES,
)
