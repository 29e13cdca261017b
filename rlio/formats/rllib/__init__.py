"""RLlib's recordings: records in JSON lines and Parquet, and episodes of the new stack."""
