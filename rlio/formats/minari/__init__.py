"""Minari data sets."""
