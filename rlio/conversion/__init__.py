"""Conversion of anything that rlio reads into a data set of rlio, or into the format of another library."""

from rlio.support.isolation import Isolation

__all__ = ["Isolation"]
