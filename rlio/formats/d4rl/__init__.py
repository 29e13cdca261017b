"""D4RL's flat HDF5."""
