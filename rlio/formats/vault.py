"""Flashbax Vaults: zarr arrays in one OCDBT store."""

from rlio.formats.format import Format, Marks, with_all_of

FORMAT = Format(
    name="vault",
    title="Flashbax Vault",
    marks=Marks(json=with_all_of({"structure_shape", "structure_dtype"})),
    advice=(
        "rlio does not read it yet; load it with its own library and write each episode as a SampleBatch "
        "(obs, new_obs, actions, rewards, terminateds, truncateds, eps_id, t) with rlio.ParquetWriter"
    ),
)
