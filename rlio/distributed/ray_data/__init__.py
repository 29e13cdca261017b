"""Data sets in and out of Ray Data."""
