"""The contract of stored experience, and how the engine reads it: see `rlio.source.source`."""
