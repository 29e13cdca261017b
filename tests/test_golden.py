"""Files of earlier versions of the format read as they were written."""

from pathlib import Path

import pytest
from golden_data import DATA_SETS

import rlio

GOLDEN = Path(__file__).with_name("golden")
ROOTS = sorted(root.parent for root in GOLDEN.glob("format-*/*/_rlio.json"))


def test_every_data_set_has_golden_files() -> None:
    assert {root.name for root in ROOTS} == {
        f"{n}.{kind}" for n in DATA_SETS for kind in ("parquet", "jsonl")
    }


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: f"{root.parent.name}-{root.name}")
def test_golden_files_read_equal_to_the_rows_that_made_them(root: Path) -> None:
    expected = DATA_SETS[root.stem]()
    with rlio.DatasetReader(root, epochs=1, batch_size=1000) as reader:
        (batch,) = reader
    assert batch.equals(expected)


def test_golden_spaces_are_kept() -> None:
    data = rlio.open_dataset(GOLDEN / "format-0" / "cartpole_like.parquet")
    (schema,) = data.schemas.values()
    assert schema.policies["default_policy"].spaces["action"]["type"] == "Discrete"
