"""Nothing that is read can run code: the means are not in the package, and others' hooks are never called."""

from __future__ import annotations

import ast
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hostile_corpus import WRITER, files, parquet_files, save, shard_name, shard_of, small_batch
from stored_batches import fresh_root, put

import rlio
from rlio.errors import CorruptData, RlioError, UnsafeData, excerpt
from rlio.limits import Limits

#: Functions that run what data says, and methods that do, or that unpack it to where it says.
FORBIDDEN_METHODS = frozenset(("extractall", "unpack_archive", "system", "popen"))
FORBIDDEN_CALLS = frozenset(("eval", "exec", "compile", "__import__", "execfile"))
FORBIDDEN_MODULES = frozenset(
    ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml", "copyreg")
)
# A file without any of these words has none of the dangers, and is not parsed.
_WORDS = FORBIDDEN_METHODS | FORBIDDEN_CALLS | FORBIDDEN_MODULES | {"allow_pickle", "weights_only"}
_SUSPICIOUS = re.compile(rf"\b({'|'.join(_WORDS)})\b|\.load\b")


def sources(checkout: Path) -> list[Path]:
    """The files of the package; symbolic links to them left out."""
    found = [
        path
        for folder in ("rlio", "readers", "writers", "schemas")
        for path in sorted((checkout / folder).rglob("*.py"))
        if not any(parent.is_symlink() for parent in path.parents)
    ]
    assert len(found) > 100
    return found


def _name(called: ast.expr) -> str:
    """As it is written; of what is not a name and its attributes, those attributes behind a dot."""
    if isinstance(called, ast.Name):
        return called.id
    if isinstance(called, ast.Attribute):
        return f"{_name(called.value)}.{called.attr}"
    return ""


def dangers(source: str) -> list[str]:
    """What a file uses that could run what data says."""
    found: list[str] = []
    if not _SUSPICIOUS.search(source):
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [name for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.Call):
            called = _name(node.func)
            if called.removeprefix("builtins.") in FORBIDDEN_CALLS:
                found.append(called)
            if called.rsplit(".", 1)[-1] in FORBIDDEN_METHODS:
                found.append(called)
            if called == "torch.load" or called.endswith("pickle.load"):
                found.append(called)
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False":
                    found.append("allow_pickle")
                if keyword.arg == "weights_only":
                    found.append("weights_only")
            if re.fullmatch(r"(np|numpy)\.load", called) and not any(
                keyword.arg == "allow_pickle" for keyword in node.keywords
            ):
                found.append("np.load without allow_pickle=False")
    return found


def test_the_package_has_no_means_to_run_what_data_says(checkout: Path) -> None:
    found = {
        str(path.relative_to(checkout)): dangers(path.read_text(encoding="utf-8"))
        for path in sources(checkout)
    }
    # The options of a caller go through a pipe to a process of its own; its answer is JSON.
    assert found.pop("rlio/support/isolation.py") == ["pickle", "pickle.load"]
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle", "from pickle import loads", "import cloudpickle.x", "eval(text)", "exec(text)",
        "np.load(path)", "np.load(path, allow_pickle=True)", "torch.load(path, weights_only=True)",
        "archive.extractall(folder)", "import yaml", "os.system(text)", "builtins.compile(text, '', 'eval')",
    ],
)  # fmt: skip
def test_a_planted_danger_is_found(planted: str) -> None:
    assert dangers(f"def f():\n    {planted}\n")


# ---- extension types ----


class Counted(pa.ExtensionType):  # type: ignore[misc]  # pyarrow ships no types
    """An extension type whose library counts how often it is asked."""

    calls = 0

    def __init__(self) -> None:
        super().__init__(pa.int64(), "rlio.test.counted")

    def __arrow_ext_serialize__(self) -> bytes:
        return b"x"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, serialized: bytes) -> Any:
        cls.calls += 1
        return cls()


@pytest.fixture
def hook() -> Any:
    pa.register_extension_type(Counted())
    yield Counted
    pa.unregister_extension_type("rlio.test.counted")


def extended() -> bytes:
    """The small shard's rows, with a column of the extension type, as Arrow writes them."""
    table = pq.read_table(pa.BufferReader(shard_of(parquet_files()))).drop_columns(
        ["_next", "_new_obs", "_batch", "_stream"]
    )
    index = table.schema.get_field_index("t")
    column = pa.ExtensionArray.from_storage(Counted(), pa.array(range(len(table)), pa.int64()))
    sink = io.BytesIO()
    pq.write_table(table.set_column(index, "t", column), sink)
    return sink.getvalue()


def test_extension_types_are_refused_before_their_hooks_can_run(hook: Any, tmp_path: Path) -> None:
    data = extended()
    pq.read_metadata(io.BytesIO(data)).schema.to_arrow_schema()
    assert hook.calls > 0, "the hook is called by whoever looks"
    kept = {path: text for path, text in parquet_files().items() if not path.startswith("data/")}
    save(tmp_path / "set", {**kept, f"data/{WRITER}/{shard_name(data, rows=30)}": data})
    save(tmp_path / "foreign", {"a.parquet": data})
    hook.calls = 0
    with pytest.raises(UnsafeData, match="Arrow schema"):
        list(rlio.DatasetReader(tmp_path / "set", epochs=1))
    with pytest.raises(UnsafeData, match="extension type"):
        list(rlio.ForeignParquetReader(tmp_path / "foreign", epochs=1))
    stored = rlio.ForeignParquetReader(tmp_path / "foreign", epochs=1, extension_types="storage")
    assert len(next(iter(stored))["t"]) == 30
    stored.close()
    assert hook.calls == 0


# ---- limits and messages ----


@pytest.mark.parametrize("value", [0, -1, 1.5, None, True, "1"])
def test_a_limit_is_a_positive_whole_number(value: Any) -> None:
    with pytest.raises(rlio.errors.OptionError, match="group_bytes"):
        Limits(group_bytes=value)


def test_an_excerpt_is_what_ascii_says_up_to_its_length() -> None:
    for data in ("a\x1b[31m", b"\xff", [1, "x", {"a": (1,)}], (), (1,), {}, {"a": [None]}, 1.5, None):
        assert excerpt(data) == ascii(data)
    assert len(excerpt("x" * 10**8)) < 240
    assert len(excerpt([["y" * 10**7]] * 10**5)) < 240
    assert len(excerpt({"k" * 1000: 1})) < 240


def test_messages_are_one_printable_line_whatever_names_they_hold() -> None:
    text = str(RlioError("found \x1b[31m\r\n", uri="s3://b/a\nb", column="c\u202e\ud800" + "x" * 5000))
    assert text.isprintable()
    assert len(text) < 400


def test_a_link_to_credentials_shows_none_in_an_error(tmp_path: Path) -> None:
    """A data set's names and texts never reach fsspec, and what it was opened with never reaches an error."""
    root = fresh_root()
    for path, data in parquet_files().items():
        put(f"{root}/{path}", data[:-1] if path.startswith("data/") else data)
    with pytest.raises(CorruptData) as caught:
        list(rlio.DatasetReader(root, epochs=1, storage_options={"skip_instance_cache": "hunter2"}))
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in "".join(text.decode("latin1") for text in files(root, "").values())


def test_the_small_batch_is_what_the_corpus_is_made_from(tmp_path: Path) -> None:
    save(tmp_path, parquet_files())
    found = rlio.concat_samples(list(rlio.DatasetReader(tmp_path, epochs=1)))
    assert np.array_equal(found["obs"], small_batch()["obs"])
