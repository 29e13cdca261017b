"""What decodes the files of others charges an allowance first: all of it, by a list that fits the code.

Not here: what the allowance refuses in real files (`hostile_files`, of `test_hostile.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import rlio
from rlio.errors import UnsafeData
from rlio.formats.files.allowance import Allowance
from rlio.limits import Limits

ROOT = Path(rlio.__file__).parent
PLACES = (
    *sorted((ROOT / "formats").rglob("*.py")),
    ROOT / "batch/npz.py",
    *sorted((ROOT / "storage").glob("zip*.py")),
)
#: Calls that make values, texts, objects or pictures of bytes.
DECODERS = frozenset(
    (
        *("loads", "unpackb", "Unpacker", "literal_eval", "genops"),
        *("frombuffer", "read_magic", "read_array_header_1_0", "read_array_header_2_0", "ndarray"),
        *("ZipFile", "decompress", "decompressobj", "CompressedInputStream", "b64decode"),
        *(
            "read_json",
            "read_csv",
            "iter_batches",
            "read_record_batch",
            "read_tensor",
            "open_file",
            "open_stream",
        ),
        *("ParquetFile", "to_pylist", "read_direct", "dictionary_decode"),
        "decode_video",
    )
)
#: What charges: the accounts of `Allowance`, and the checks of `Limits`.
CHARGES = frozenset(("spend", "count", "claim", "visit", "check_inflation", "check_json", "check_containers"))
#: What has the accounts, by the end of its name.
OWNERS = ("allowance", "piece", "limits", "_handles", "Allowance(self._limits)", "DEFAULT_LIMITS")
#: Helpers that do not charge themselves, and why they need not.
CHARGED_ELSEWHERE = {
    "formats/files/arrow_columns.py:_to_column": "no file has dictionaries: ArrowTable refuses them",
    "formats/files/arrow_columns.py:_shaped": "a part of a footer, which Limits.footer_bytes bounds",
    "formats/files/arrow_columns.py:_without_nulls": "a copy of numbers, or of flags, that were read",
    "formats/files/arrow_columns.py:bytes_of_views": "a view of a buffer, to measure it",
    "formats/files/line_files.py:LineFile.open": "open_archive checked the zip file",
    "formats/files/packed.py:_decompress": "no more than the bytes that are left, which unpack charges",
    "formats/files/packed.py:_inflated_size": "keeps nothing, and stops at the bytes that are left",
    "formats/files/parquet_footer.py:_open": "read_metadata bounds the footer; no page is read",
    "formats/files/parquet_footer.py:plain_schema": "a footer, or the first message, of bounded size",
    "formats/files/parquet_files.py:ParquetFiles._scan_of": "reads no page; rows charges for each batch",
    "formats/files/tf_records.py:Example._ends": "blocks of a megabyte",
    "formats/files/tf_records.py:floats_of": "RldsSource._array",
    "formats/files/tf_records.py:ints_of": "RldsSource._array",
    "formats/lerobot/source.py:LeRobotSource._pictures": "ParquetFiles.rows read them; decode_images charges",
    "formats/minari/source.py:_ArrowStore._value": "ArrowTable._decoded and ParquetFiles.rows read them",
    "formats/rllib/states.py:unpack": "_Hooks, for each map, list and array",
    "formats/rllib/states.py:read_keys": "_Hooks, for each map, list and array",
    "formats/rllib/states.py:_bounds": "inflates Limits.schema_bytes at most",
    "formats/tables/csv.py:CsvTable.parse": "TextTable._index and decode",
    "formats/tables/jsonl.py:JsonlTable.parse": "TextTable._index and decode",
    "formats/tables/jsonl.py:JsonlTable._check": "a view of the text",
    "formats/tables/parquet_source.py:BatchRows._record": "ParquetFiles.rows read them",
    "formats/torchrl.py:TorchrlSource._read": "plain bytes of the file, as many as it has; load charges",
    "formats/zarr_buffers.py:_chunks": "a view of the index of a shard",
    "formats/zarr_buffers.py:_size_of": "measures, keeps nothing, and stops at the bytes of a chunk",
    "batch/npz.py:unpack_arrays": "no more than the bytes that it is given",
    "batch/npz.py:read_array": "NpzTable._decoded; unpack_arrays",
    "batch/npz.py:read_header": "10,000 bytes",
    "storage/zip_files.py:open_archive": "check_directory bounds what is read; members_of counts",
}


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods, by their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def decodes(node: ast.AST) -> bool:
    """Whether it calls a decoder, or reads rows of an HDF5 dataset."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return name in DECODERS
    if not isinstance(node, ast.Subscript):
        return False
    value = node.value.func if isinstance(node.value, ast.Call) else node.value
    return isinstance(value, ast.Name | ast.Attribute) and ast.unparse(value).endswith("dataset")


def charges(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)):
        return False
    if isinstance(node.func, ast.Name):  # `count = self._allowance.count`, and a check that is a function.
        return node.func.id in ("count", "check_containers")
    return node.func.attr in CHARGES and ast.unparse(node.func.value).endswith((*OWNERS, "self"))


def helpers() -> dict[str, bool]:
    """Each function that decodes foreign bytes, and whether it charges."""
    return {
        f"{path.relative_to(ROOT).as_posix()}:{name}": any(map(charges, ast.walk(function)))
        for path in PLACES
        for name, function in functions(ast.parse(path.read_text()))
        if any(map(decodes, ast.walk(function))) and "Sink." not in name and name != "write_arrays_to"
    }


def test_each_helper_that_decodes_foreign_bytes_charges_an_allowance() -> None:
    found = helpers()
    assert len(found) > 40
    silent = {name for name, does in found.items() if not does}
    assert silent - CHARGED_ELSEWHERE.keys() == set(), "charge rlio.formats.files.allowance.Allowance first"
    assert CHARGED_ELSEWHERE.keys() - silent == set(), "these charge, or are gone: leave them out of the list"


def test_a_helper_that_reads_a_dataset_without_a_charge_is_found() -> None:
    function = ast.parse("def rows(self):\n    return self._dataset(0, 'x')[()]").body[0]
    assert any(map(decodes, ast.walk(function)))
    assert not any(map(charges, ast.walk(function)))


def test_a_piece_has_the_bytes_that_are_in_proportion_and_the_limits_allow() -> None:
    limits = Limits(group_bytes=10_000, free_bytes=500, inflation=10)
    for stored, most in ((1, 500), (100, 1000), (5000, 10_000), (None, 10_000)):
        allowance = Allowance(limits, stored=stored)
        for _ in range(2):  # Each piece has all of them.
            piece = allowance.piece()
            piece.spend(most)
            with pytest.raises(UnsafeData, match=rf"more than {most} bytes"):
                piece.spend(1)


def test_rows_are_claimed_over_the_whole_data_set() -> None:
    allowance = Allowance(Limits(free_bytes=1600, inflation=1), stored=10)
    allowance.claim(60)
    allowance.claim(40)
    with pytest.raises(UnsafeData, match="10 bytes claim 101 rows"):
        allowance.claim(1)
    Allowance(Limits(free_bytes=1, inflation=1), stored=1000).claim(
        1000
    )  # One byte a row is always in proportion.
    Allowance(stored=None).claim(10**12)


def test_values_and_objects_are_counted_by_the_piece() -> None:
    piece = Allowance(Limits(packed_values=10), stored=80, packed=5).piece()
    piece.count(10)
    with pytest.raises(UnsafeData, match="packed_values"):
        piece.count(1)
    piece = Allowance(stored=80).piece()
    piece.visit(4096 + 10)
    with pytest.raises(UnsafeData, match="many names"):
        piece.visit()


@pytest.mark.parametrize(
    "name", ["tianshou/ring.hdf5", "d3rlpy/buffer.h5", "minari/cart/collected-v0", "torchrl/ring"]
)
def test_a_small_allowance_refuses_what_a_format_decodes(name: str) -> None:
    path = Path(__file__).with_name("golden") / "formats" / name
    with (
        pytest.raises(UnsafeData, match=r"group_bytes|too large"),
        rlio.read(path, epochs=1, limits=Limits(group_bytes=8)) as reader,
    ):
        np.concatenate([batch["rewards"] for batch in reader])
