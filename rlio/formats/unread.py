"""Advice for data in a format that is recognised but not read."""

from typing import Final

__all__ = ["WRITE_BATCHES"]

#: The end of a message.
WRITE_BATCHES: Final = (
    "rlio does not read it yet; load it with its own library and write each episode as a SampleBatch (obs, "
    "new_obs, actions, rewards, terminateds, truncateds, eps_id, t) with rlio.ParquetWriter"
)
