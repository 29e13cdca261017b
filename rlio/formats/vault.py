"""Flashbax Vaults: zarr arrays in one OCDBT store."""

from rlio.formats.format import Format, Marks, with_all_of
from rlio.formats.unread import WRITE_BATCHES

FORMAT = Format(
    name="vault",
    title="Flashbax Vault",
    marks=Marks(json=with_all_of({"structure_shape", "structure_dtype"})),
    advice=WRITE_BATCHES,
)
