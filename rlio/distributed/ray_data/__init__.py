"""Data sets to and from Ray Data."""
