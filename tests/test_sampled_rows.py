"""Runners and recorders give the rows of `sampled_rows` bit for bit, from fixed seeds."""

from __future__ import annotations

import json

from sampled_rows import GOLDEN, WAYS, digest


def test_each_way_to_sample_gives_the_rows_of_its_golden_hash() -> None:
    """After a change of rows that is meant: ``python tests/sampled_rows.py --write``, and CHANGELOG.md."""
    golden = json.loads(GOLDEN.read_text())
    assert golden.keys() == WAYS.keys()
    assert [way for way in WAYS if digest(way) != golden[way]] == []
