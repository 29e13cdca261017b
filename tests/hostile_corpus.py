"""Data that strangers could send: files and folders, made in code, each with what reading it must end in.

`CASES` is the corpus. A case makes its data in an empty folder and says how it is opened. Reading it with
``on_error="raise"`` must raise an error of ours; with ``on_error="skip"`` it must raise one, or serve the
rows that `Case.rows` says and count the rest. What is harmless is in the corpus as well, and must be served.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import pickle
import socket
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from stored_batches import files, fresh_root, group_bytes

from rlio import JsonWriter, Mapping, ParquetWriter, Roll, SampleBatch
from rlio.catalog.names import ShardName
from rlio.schemas.schema import Schema, canonical_json

WRITER = "w00000-00000000"
#: Where the payload of every case that could run code would leave its mark, below the folder of the case.
MARK = "owned"

Make = Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """One piece of the corpus.

    Attributes:
        name: What is wrong with it.
        make: Makes it in an empty folder.
        opener: "dataset", "zip", "json", "foreign" or "read": what opens the folder.
        rows: Rows that are served when damage is skipped; None: whatever number.
        harmless: Whether nothing is wrong with it.
        options: Limits of the reader.
        mapping: Its mapping; None: it has none.
    """

    name: str
    make: Make
    opener: str
    rows: int | None = None
    harmless: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    mapping: Mapping | None = None


CASES: list[Case] = []


def add(name: str, make: Make, opener: str, **more: Any) -> None:
    """Put a case into the corpus."""
    CASES.append(Case(name, make, opener, **more))


# ---- a small data set, and forged ones under right CRCs ----


def small_batch(rows: int = 30) -> SampleBatch:
    """Rows with a column of every kind that the format stores in its own way."""
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(rows + 1, 3)).astype(np.float32)
    infos = np.empty(rows, object)
    infos[:] = [{"n": [i]} for i in range(rows)]  # A list is stored as JSON.
    return SampleBatch(
        obs=obs[:-1],
        new_obs=obs[1:],
        actions=rng.integers(0, 4, rows),
        infos=infos,
        label=np.array([f"text {i % 7}" for i in range(rows)]),
        eps_id=np.arange(rows) // 10,
        t=np.arange(rows) % 10,
        rewards=rng.normal(size=rows).astype(np.float32),
    )


def _written(writer: Any, *batches: Any, **options: Any) -> dict[str, bytes]:
    root = fresh_root()
    with group_bytes(1000), writer(root, writer_id=WRITER, roll=Roll(max_seconds=None), **options) as out:
        for batch in batches:
            out.write(batch)
    found = files(root, "")
    prefix = root.removeprefix("memory:/") + "/"
    return {path.removeprefix(prefix): data for path, data in found.items()}


@cache
def parquet_files() -> dict[str, bytes]:
    """Path below the root -> bytes, of a data set with one Parquet shard of several row groups."""
    return _written(ParquetWriter, small_batch())


@cache
def json_files(compression: str | None = None) -> dict[str, bytes]:
    """The same, of JSON shards of three lines of 10 rows each."""
    batch = small_batch()
    return _written(JsonWriter, batch[:10], batch[10:20], batch[20:], compression=compression)


def shard_of(found: dict[str, bytes]) -> bytes:
    """The one shard of a data set."""
    (data,) = (data for path, data in found.items() if ShardName.parse(path.rsplit("/", 1)[-1]))
    return data


def footer_of(data: bytes) -> bytes:
    """The footer of a Parquet file, length and magic included."""
    return data[len(data) - int.from_bytes(data[-8:-4], "little") - 8 :]


def save(folder: Path, found: dict[str, bytes]) -> None:
    """Write files."""
    for path, data in found.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def shard_name(data: bytes, *, rows: int, first: int = 0, suffix: Any = "parquet") -> str:
    """The name that certifies ``data``."""
    footer = zlib.crc32(footer_of(data)) if suffix == "parquet" else 0
    name = ShardName(
        first=first, rows=rows, size=len(data), crc32=zlib.crc32(data), footer_crc32=footer, suffix=suffix
    )
    return name.format()


def save_shard(
    folder: Path,
    data: bytes,
    *,
    rows: int = 30,
    first: int = 0,
    suffix: Any = "parquet",
    schema: str | None = None,
) -> None:
    """A data set of one shard, under the name that is right for it, with the small schema or another."""
    base = parquet_files() if suffix == "parquet" else json_files()
    kept = {path: text for path, text in base.items() if path == "_rlio.json" or path.startswith("_schema/")}
    if schema is not None:
        name = "0123456789abcdef"
        with contextlib.suppress(ValueError):
            name = Schema.from_text(schema).hash
        kept[f"_schema/{name}.json"] = schema.encode()
    save(folder, {**kept, f"data/{WRITER}/{shard_name(data, rows=rows, first=first, suffix=suffix)}": data})


def forged_table(
    change: Callable[[pa.Table], pa.Table],
    *,
    schema: Callable[[Any], object] | None = None,
    entries: Callable[[dict[str, Any]], object] = lambda found: None,
    **options: Any,
) -> tuple[bytes, int, str]:
    """The small shard's rows, changed, as one row group under right CRCs: (bytes, rows, schema's text).

    ``entries`` changes the texts of the footer's metadata, by key.
    """
    data = shard_of(parquet_files())
    table = change(pq.read_table(pa.BufferReader(data)))
    written = {k.decode(): v.decode() for k, v in pq.read_metadata(pa.BufferReader(data)).metadata.items()}
    described = json.loads(written["rlio.schema"])
    if schema is not None:
        schema(described)
    written["rlio.schema"] = canonical_json(described)

    def finish(groups: list[Any]) -> bytes:
        sink = pa.BufferOutputStream()
        writer = pq.ParquetWriter(sink, table.schema, **{"store_schema": False, **options})
        writer.write_table(table, row_group_size=max(len(table), 1))
        found = {**written, "rlio.groups": json.dumps(groups)}
        entries(found)
        writer.add_key_value_metadata(found)
        stop = sink.tell()
        writer.close()
        whole = bytes(sink.getvalue())
        return whole if groups else whole[:stop]

    pages = finish([])
    whole = finish([[0, len(pages), zlib.crc32(pages), len(table), len(table), len(table)]])
    return whole, len(table), written["rlio.schema"]


def replaced(table: pa.Table, name: str, values: Any, nullable: bool | None = None) -> pa.Table:
    """``table`` with another column of that name."""
    index = table.schema.get_field_index(name)
    old = table.schema.field(index)
    array = values if isinstance(values, pa.Array) else pa.array(values, old.type)
    field = pa.field(name, array.type, nullable=old.nullable if nullable is None else nullable)
    return table.set_column(index, field, array)


def repeated(table: pa.Table, rows: int) -> pa.Table:
    """``rows`` rows, all of them like the first."""
    return table.slice(0, 1).take(pa.array(np.zeros(rows, np.int64)))


# ---- RLlib's JSON ----

GOOD = b'{"type":"SampleBatch","obs":[[0.5],[1.0]],"rewards":[1.0,2.0],"t":[0,1]}'


class _Payload:
    """What a pickle would run: it leaves a mark."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def _packed(stream: bytes) -> bytes:
    return base64.b64encode(lz4.frame.compress(stream))


def _line_file(line: bytes | Callable[[Path], bytes]) -> Make:
    def make(folder: Path) -> None:
        middle = line if isinstance(line, bytes) else line(folder)
        (folder / "a.json").write_bytes(GOOD + b"\n" + middle + b"\n" + GOOD + b"\n")

    return make


def _record(**columns: Any) -> bytes:
    return json.dumps(
        {"type": "SampleBatch", "obs": [[0.5], [1.0]], "rewards": [1.0, 2.0], "t": [0, 1]} | columns
    ).encode()


def _text_column(text: bytes) -> bytes:
    return b'{"obs":"' + text + b'","rewards":[1.0,2.0],"t":[0,1]}'


def _mark(folder: Path) -> str:
    return str(folder / MARK)


_BAD_LINES: dict[str, bytes | Callable[[Path], bytes]] = {
    "cut": GOOD[:30],
    "invalid UTF-8": GOOD.replace(b"obs", b"\xff\xfe\xc3"),
    "a NUL": GOOD.replace(b"0.5", b"0\x00.5"),
    "a NUL in a name": GOOD.replace(b'"t"', b'"t\x00"'),
    "a trailing comma": GOOD[:-1] + b",}",
    "a lone surrogate": _record()[:-1] + b', "label": ["\\ud800", "b"]}',
    "a key twice": b'{"t":[7,8],' + GOOD[1:],
    "1e999": GOOD.replace(b"0.5", b"1e999"),
    "an integer of 5,000 digits": GOOD.replace(b'"t":[0', b'"t":[' + b"9" * 5000),
    "an integer of 65 bits": GOOD.replace(b'"t":[0', b'"t":[36893488147419103232'),
    "lists nested 100,000 deep": b'{"t":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects nested 100,000 deep": b'{"t":' * 100_000 + b"0" + b"}" * 100_000,
    "2 million empty lists": b'{"rewards":[1,2],"t":[0,1],"obs":[' + b"[]," * 2_000_000 + b"[]]}",
    "5 million empty objects": b'{"t":[' + b"{}," * 5_000_000 + b"{}]}",
    "a number": b"7",
    "a string": b'"t"',
    "a list": b"[1]",
    "null": b"null",
    "true": b"true",
    "an empty object": b"{}",
    "an unknown type": b'{"type":"Evil","t":[1]}',
    "a type that is a list": b'{"type":[1],"t":[1]}',
    "no column of experience": b'{"a":1,"b":2}',
    "columns of unlike lengths": _record(rewards=[1.0]),
    "a missing column": b'{"obs":[[0.5],[1.0]],"t":[0,1]}',
    "an unknown column": _record(more=[1, 2]),
    "ragged rows": _record(obs=[[1.0], [1.0, 2.0]]),
    "rows of another shape": _record(obs=[[1.0, 2.0], [1.0, 2.0]]),
    "rows of another depth": _record(obs=[1.0, 2.0]),
    "text among numbers": _record(obs=[[1.0], ["x"]]),
    "objects as numbers": _record(obs=[{}, {}]),
    "null among numbers": _record(obs=[[1.0], [None]]),
    "text as a column of numbers": _record(obs="nothing packed"),
    "flags of 2": _record(terminateds=[0, 2]),
    "terminated and not done": _record(dones=[False, False], terminateds=[True, False]),
    "negative lengths of sequences": _record(seq_lens=[-1, 3]),
    "lengths of sequences that do not add up": _record(seq_lens=[1, 7]),
    "lengths of sequences of 2**62": _record(seq_lens=[2**62, 2**62]),
    "bare words": b'{"t":[undefined]}',
    "hexadecimal": b'{"t":[0x10]}',
    "a plus": b'{"t":[+1]}',
    "a comment": b"/* */" + GOOD,
    "two records": GOOD + GOOD,
    "single quotes": GOOD.replace(b'"', b"'"),
    "a byte-order mark within the file": b"\xef\xbb\xbf" + GOOD[:40],
    "UTF-16": GOOD.decode().encode("utf-16"),
    "a text of a megabyte among a million values": b'{"rewards":[1,2],"t":[0,1],"obs":["'
    + b"x" * (1 << 20)
    + b'",'
    + b"1," * 1_000_000
    + b"1]}",
    "a negative count of steps": b'{"type":"MultiAgentBatch","count":-1,"policy_batches":{}}',
    "policies that are a list": b'{"type":"MultiAgentBatch","count":1,"policy_batches":[1]}',
    "a policy that is a number": b'{"type":"MultiAgentBatch","count":1,"policy_batches":{"a":1}}',
    "infos nested 5,000 deep": b'{"rewards":[1.0,2.0],"t":[0,1],"obs":[[0.5],[1.0]],"infos":[1,'
    + b'{"a":' * 5000
    + b"1"
    + b"}" * 5000
    + b"]}",
    "a nested column 5,000 deep": b'{"rewards":[1.0,2.0],"t":[0,1],"obs":'
    + b'{"a":' * 5000
    + b"[[0.5],[1.0]]"
    + b"}" * 5001,
    "packed: no base64": _text_column(b"BCJNGGhA!!!!"),
    "packed: no LZ4": _text_column(base64.b64encode(b"\x04\x22\x4d\x18\x68\x40" + b"\xff" * 40)),
    "packed: a pickle that makes a folder": lambda f: _text_column(_packed(pickle.dumps(_Payload(_mark(f))))),
    "packed: the same, in protocol 0": lambda f: _text_column(_packed(pickle.dumps(_Payload(_mark(f)), 0))),
    "packed: the same, within an array of objects": lambda f: _text_column(
        _packed(pickle.dumps(np.array([_Payload(_mark(f)), 1], object)))
    ),
    "packed: os.system": _text_column(_packed(b"cos\nsystem\n(S'mkdir owned'\ntR.")),
    "packed: a global by attribute": _text_column(_packed(b"\x80\x04\x8c\x05numpy\x8c\x0bf2py.sys.os\x93.")),
    "packed: builtins.eval": _text_column(
        _packed(b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.")
    ),
    "packed: a list within itself": _text_column(_packed(b"\x80\x04]\x94h\x00a.")),
    "packed: tuples 100,000 deep": _text_column(_packed(b"\x80\x04)" + b"\x85" * 100_000 + b".")),
    "packed: a dictionary doubled 40 times": _text_column(
        _packed(b"\x80\x04]\x94" + b"".join(b"](h%ch%ce\x94" % (i, i) for i in range(40)) + b".")
    ),
    "packed: 600 MB of zeros": lambda _: _text_column(_packed_zeros()),
    "packed: a shape of 2**60": _text_column(
        _packed(pickle.dumps(np.zeros(4)).replace(b"K\x04\x85", b"\x8a\x08" + bytes(7) + b"\x10\x85"))
    ),
    "packed: an array of pointers": _text_column(
        _packed(pickle.dumps(np.zeros(2)).replace(b"\x8c\x02f8", b"\x8c\x02O8"))
    ),
}


@cache
def _packed_zeros() -> bytes:
    packer = lz4.frame.LZ4FrameCompressor()
    piece = bytes(1 << 24)
    frame = packer.begin() + b"".join(packer.compress(piece) for _ in range(36)) + packer.flush()
    return base64.b64encode(frame)


# ---- few bytes that stand for many ----


def _many_mentions(size: int = 1 << 24, count: int = 500) -> bytes:
    """A packed list that names one array of zeros so many times, through the memo of its stream."""
    array = np.zeros(size, np.uint8)
    return _packed(pickle.dumps([array] * count, 5))


def _many_opcodes(count: int) -> bytes:
    """A packed list of as many numbers: two opcodes each."""
    return _packed(b"\x80\x04]" + b"K\x01a" * count + b".")


def _eight(row: bytes) -> bytes:
    names = b"".join(b'"c%d":"%b",' % (i, row) for i in range(8))
    return b"{%b" % names + GOOD[1:]


_BAD_LINES |= {
    "packed: an array named 500 times": lambda _: _text_column(_many_mentions()),
    "packed: rows that name an array 500 times": lambda _: (
        b'{"obs":["%b","%b"],"rewards":[1.0,2.0],"t":[0,1]}' % ((_many_mentions(1 << 22),) * 2)
    ),
    "packed: a text of a megabyte in a list of many": lambda _: _text_column(
        _packed(pickle.dumps(["x" * (1 << 20)] + ["y"] * 100_000, 4))
    ),
    "packed: bytes of a megabyte in a list of many": lambda _: _text_column(
        _packed(pickle.dumps([b"x" * (1 << 20)] + [b"y"] * 100_000, 4))
    ),
    "packed: texts in tuples, one of a megabyte": lambda _: _text_column(
        _packed(pickle.dumps([("x" * (1 << 20),)] + [("y",)] * 100_000, 4))
    ),
    "packed: 10**9 rows of nothing": lambda _: _text_column(_packed(pickle.dumps(np.empty((10**9, 0)), 5))),
}

for _name, _bad in _BAD_LINES.items():
    add(f"JSON line: {_name}", _line_file(_bad), "json", rows=4)
add(
    "JSON line: packed: eight columns of 50,000 opcodes",
    _line_file(lambda _: _eight(_many_opcodes(25_000))),
    "json",
    rows=4,
    options=(("packed_values", 100_000),),
)
add("JSON line: no rows", _line_file(_record(obs=[], rewards=[], t=[])), "json", rows=4, harmless=True)
add(
    "JSON: line ends of Windows, a byte-order mark, blank lines",
    lambda f: save(f, {"a.json": b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n" + GOOD}),
    "json",
    rows=4,
    harmless=True,
)


def _whole(data: bytes, name: str = "a.json") -> Make:
    return lambda folder: save(folder, {name: data})


def _long_line(folder: Path) -> None:
    with open(folder / "a.json", "wb") as file:
        file.write(GOOD + b'\n{"t":[')
        file.seek(200 << 20, os.SEEK_CUR)  # A hole: zeros that take no disk.
        file.write(b"1]}\n" + GOOD + b"\n")


add("JSON: a line of 200 MB", _long_line, "json", rows=4)
for _name, _record_of in {
    "10**9 rows of nothing": lambda: b'{"obs":"' + _packed(pickle.dumps(np.empty((10**9, 0)), 5)) + b'"}',
    "5,000 columns": lambda: _record(**{f"c{i}": [1, 2] for i in range(5000)}),
    "a nested column of 5,000 parts": lambda: _record(obs={f"c{i}": [1, 2] for i in range(5000)}),
    "a packed column of 5,000 parts": lambda: _text_column(
        _packed(pickle.dumps({f"c{i}": [1, 2] for i in range(5000)}))
    ),
    "a nested column 20 deep": lambda: (
        b'{"rewards":[1.0,2.0],"t":[0,1],"obs":' + b'{"a":' * 20 + b"[[0.5],[1.0]]" + b"}" * 21
    ),
}.items():
    add(f"JSON: {_name}", lambda f, r=_record_of: save(f, {"a.json": r()}), "json")
add("JSON: an empty file", _whole(b""), "json")
add("JSON: a byte-order mark and nothing else", _whole(b"\xef\xbb\xbf"), "json")
add("JSON: only line ends", _whole(b"\n" * 1000), "json")
add("JSON: random bytes", _whole(np.random.default_rng(0).bytes(20_000)), "json")
add("JSON: gzip behind a suffix", _whole(zlib.compress(GOOD, wbits=31)), "json")


def _zipped(*members: tuple[str | zipfile.ZipInfo, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return stream.getvalue()


def _zip_link() -> bytes:
    info = zipfile.ZipInfo("a.json")
    info.external_attr = 0o120777 << 16
    return _zipped((info, b"/etc/passwd"))


def _zip_of_names(count: int) -> bytes:
    """A zip file that is a directory of ``count`` members and nothing else."""
    entry = struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 20, 20, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0)
    directory = (entry + b"a.json") * count
    return directory + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 65535, 65535, len(directory), 0, 0)


@cache
def _zip_bomb() -> bytes:
    return _zipped(("a.json", bytes(100 << 20)))


def _zip_flag() -> bytes:
    data = bytearray(_zipped(("a.json", GOOD)))
    data[data.index(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


def _zip_smaller() -> bytes:
    """Says 10 bytes; has 50 MB."""
    data = bytearray(_zipped(("a.json", bytes(50 << 20))))
    at = data.index(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", 10)
    return bytes(data)


_ZIPS: dict[str, Callable[[], bytes]] = {
    "a bomb": _zip_bomb,
    "random bytes": lambda: np.random.default_rng(1).bytes(5000),
    "cut": lambda: _zipped(("a.json", GOOD))[:-30],
    "cut within a member": lambda: _zipped(("a.json", GOOD * 100))[20:],
    "encrypted": _zip_flag,
    "bzip2": lambda: _zipped(("a.json", GOOD), method=zipfile.ZIP_BZIP2),
    "a symbolic link": _zip_link,
    "a zip in a zip": lambda: _zipped(("b.zip", _zipped(("a.json", GOOD)))),
    "110,000 names": lambda: _zip_of_names(110_000),
    "a directory of 20 MB": lambda: _zip_of_names(400_000),
    "more than it says": _zip_smaller,
    "empty": lambda: _zipped(),
    "60 MB of newlines": lambda: _zipped(("a.json", b"\n" * (60 << 20))),
    "60 MB of blank lines of Windows": lambda: _zipped(("a.json", b" \r\n" * (20 << 20))),
    "2 million lines": lambda: _zipped(("a.json", b"1\n" * (2 << 20))),
    "a wrong checksum": lambda: _zipped(("a.json", GOOD), method=zipfile.ZIP_STORED).replace(
        b"[0.5]", b"[0.6]", 1
    ),
}
for _name, _zip in _ZIPS.items():
    add(f"zip: {_name}", lambda f, z=_zip: save(f, {"a.zip": z()}), "json")
for _path in ("../../owned.json", "/tmp/owned.json", "a/../../owned.json"):
    add(
        f"zip: a member named {_path}",
        lambda f, p=_path: save(f, {"a.zip": _zipped((p, GOOD))}),
        "json",
        rows=2,
        harmless=True,
    )

# ---- other files, by any name ----


def _npy(folder: Path) -> None:
    with open(folder / "a.npy", "wb") as file:
        np.save(file, np.array([_Payload(_mark(folder))], object), allow_pickle=True)


add("a pickle", lambda f: save(f, {"a.pkl": pickle.dumps(_Payload(_mark(f)))}), "read")
add("a pickle named .json", lambda f: save(f, {"a.json": pickle.dumps(_Payload(_mark(f)))}), "json")
add("a pickle named .parquet", lambda f: save(f, {"a.parquet": pickle.dumps(_Payload(_mark(f)))}), "foreign")
add("a NumPy file of objects", _npy, "read")
add(
    "a torch file",
    lambda f: save(f, {"a.pt": _zipped(("archive/data.pkl", pickle.dumps(_Payload(_mark(f)))))}),
    "read",
)
add("a tar file", _whole(b"a.json" + bytes(506) + GOOD, "a.tar"), "read")
add("a gzip file", _whole(zlib.compress(GOOD, wbits=31), "a.json.gz"), "read")


# ---- JSON shards ----


def _sealed(start: bytes) -> bytes:
    return b'%b,"crc32":"%08x"}' % (start, zlib.crc32(start))


def _json_lines() -> list[bytes]:
    return shard_of(json_files()).splitlines()


def _edited(line: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A line with other content under a right CRC."""
    found = json.loads(line)
    del found["crc32"]
    change(found)
    return _sealed(json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode()[:-1])


def _json_shard(*lines: bytes, rows: int = 30) -> Make:
    return lambda folder: save_shard(
        folder, b"".join(line + b"\n" for line in lines), rows=rows, suffix="jsonl"
    )


def _packed_shard(*frames: bytes, rows: int = 30) -> Make:
    return lambda folder: save_shard(folder, b"".join(frames), rows=rows, suffix="jsonl.zst")


def _column(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda found: found["columns"].update({name: value})


def _blob(data: bytes, **more: Any) -> dict[str, Any]:
    return {"zstd": base64.b64encode(zstandard.compress(data)).decode(), **more}


def _unsized(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


def _windowed(line: bytes, log: int = 30) -> bytes:
    """A frame whose header asks for a window of 2**log bytes: one raw block."""
    head = struct.pack("<IBB", 0xFD2FB528, 0x00, (log - 10) << 3)
    return head + (len(line) << 3 | 1).to_bytes(3, "little") + line


@cache
def _zstd_zeros(size: int) -> bytes:
    packer = zstandard.ZstdCompressor().compressobj(size=size)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(size >> 20)) + packer.flush()


_VALUES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a bare NaN": _column("rewards", [float("nan")] * 10),
    "1e999": _column("rewards", ["REPLACED"] * 10),
    "integers that do not fit": _column("actions", [2**63] * 10),
    "floats as integers": _column("actions", [0.5] * 10),
    "ragged rows": _column("obs", [[1.0]] * 9 + [[1.0, 2.0]]),
    "rows of another shape": _column("obs", [[1.0] * 4] * 10),
    "fewer rows": _column("obs", [[1.0] * 3] * 9),
    "a string": _column("obs", "nothing"),
    "a number": _column("obs", 7),
    "an object": _column("obs", {"a": 1}),
    "text among numbers": _column("obs", [["x"] * 3] * 10),
    "a blob that inflates to 300 MB": _column("obs", {"zstd": base64.b64encode(b"REPLACED").decode()}),
    "a blob of another size": _column("obs", _blob(bytes(121))),
    "a blob with more keys": _column("obs", _blob(bytes(120), more=1)),
    "a blob that is no base64": _column("obs", {"zstd": "!!!"}),
    "a blob that is no zstd": _column("obs", {"zstd": "aaaa"}),
    "a blob without size": _column("obs", {"zstd": base64.b64encode(_unsized(bytes(120))).decode()}),
    "two frames in a blob": _column(
        "obs", {"zstd": base64.b64encode(zstandard.compress(bytes(120)) * 2).decode()}
    ),
    "a blob of text that is an object": _column("label", _blob(b'{"a":1}')),
    "text: numbers": _column("label", [1] * 10),
    "text: a lone surrogate": _column("label", ["\\ud800"] * 10),
    "objects: an array that is padding": _column(
        "infos", [{"$array": "<U60000000", "shape": [1], "data": ["a"]}] * 10
    ),
    "objects: an array of 2**40": _column("infos", [{"$array": "<f8", "shape": [1 << 40], "data": []}] * 10),
    "objects: a negative shape": _column(
        "infos", [{"$array": "<f8", "shape": [-2, -3], "data": [1] * 6}] * 10
    ),
    "objects: a dtype of code": _column("infos", [{"$array": "O,i4", "shape": [1], "data": [1]}] * 10),
    "objects: keys that collide": _column(
        "infos", [{"$map": [[i * (2**61 - 1), 0] for i in range(20_000)]}] * 10
    ),
    "objects: a list as a key": _column("infos", [{"$map": [[[1], 0]]}] * 10),
    "objects: a map of numbers": _column("infos", [{"$map": [1, 2]}] * 10),
    "objects: half a mark": _column("infos", [{"$tuple": 7}] * 10),
    "objects: an unknown float": _column("infos", [{"$float": "Nine"}] * 10),
    "a column too many": lambda found: found["columns"].update(more=[1] * 10),
    "a column too few": lambda found: found["columns"].pop("obs"),
    "more rows than columns": lambda found: found.update(rows=11),
    "rows of 10**15": lambda found: found.update(rows=10**15),
    "negative rows": lambda found: found.update(rows=-1),
    "other units": lambda found: found.update(units=3),
    "attributes of code": lambda found: found.update(attributes={"max_seq_len": "x"}),
    "the other type": lambda found: found.update(type="MultiAgentBatch"),
    "another schema": lambda found: found.update(schema="0" * 16),
    "a schema that is a path": lambda found: found.update(schema="../../etc/passwd"),
}


def _value_case(change: Callable[[dict[str, Any]], object]) -> Make:
    def make(folder: Path) -> None:
        first, a, b, c = _json_lines()
        bad = _edited(b, change)
        bad = bad.replace(b'"REPLACED"', b"1e999").replace(b"\\\\ud800", b"\\ud800")
        bad = bad.replace(base64.b64encode(b"REPLACED"), base64.b64encode(_zstd_zeros(300 << 20)))
        bad = _sealed(bad[: bad.rindex(b',"crc32"')])
        _json_shard(first, a, bad, c)(folder)

    return make


for _name, _change in _VALUES.items():
    add(f"JSON shard: {_name}", _value_case(_change), "dataset")


def _other_crc(line: bytes) -> bytes:
    """The line with another last digit of its CRC."""
    return line[:-3] + (b"1" if line[-3:-2] == b"0" else b"0") + line[-2:]


_JSON_SHARDS: dict[str, Callable[[], Make]] = {
    "no line": lambda: _json_shard(b""),
    "lines that are no objects": lambda: _json_shard(b"[]", b"7", b"null"),
    "a CRC of nothing": lambda: _json_shard(*_json_lines()[:3], _other_crc(_json_lines()[3])),
    "a key twice": lambda: _json_shard(
        *_json_lines()[:3], _sealed(_json_lines()[3][:-20].replace(b'"columns":{', b'"columns":{"t":[1],'))
    ),
    "lists 100,000 deep": lambda: _json_shard(
        *_json_lines()[:3],
        _sealed(_json_lines()[3][:-20].replace(b'"columns":{', b'"columns":{"x":' + b"[" * 100_000)),
    ),
    "5 million lists": lambda: _json_shard(
        *_json_lines()[:3],
        _sealed(
            _json_lines()[3][:-20].replace(b'"columns":{', b'"columns":{"x":[' + b"[]," * 5_000_000 + b"[]],")
        ),
    ),
    "a million empty lines": lambda: _json_shard(*_json_lines(), *[b""] * 1_000_000),
    "fewer rows than its name says": lambda: _json_shard(*_json_lines(), rows=31),
    "more rows than its name says": lambda: _json_shard(*_json_lines(), rows=29),
    "the provenance twice": lambda: _json_shard(_json_lines()[0], *_json_lines()),
    "provenance of 3 million lists": lambda: _json_shard(
        _sealed(
            _json_lines()[0][:-20].replace(
                b'"provenance":{', b'"provenance":{"x":[' + b"[]," * 3_000_000 + b"[]],"
            )
        ),
        *_json_lines()[1:],
    ),
}
for _name, _shard in _JSON_SHARDS.items():
    add(
        f"JSON shard: {_name}",
        lambda f, s=_shard: s()(f),
        "dataset",
        harmless=_name.startswith("provenance of"),
        rows=30 if _name.startswith("provenance of") else None,
    )


def _frames() -> list[bytes]:
    return [zstandard.compress(line + b"\n") for line in _json_lines()]


_PACKED_SHARDS: dict[str, Callable[[], Make]] = {
    "a frame that inflates to 300 MB": lambda: _packed_shard(*_frames()[:3], _zstd_zeros(300 << 20)),
    "a frame that inflates to 60 MB": lambda: _packed_shard(*_frames()[:3], _zstd_zeros(60 << 20)),
    "a frame without size": lambda: _packed_shard(*_frames()[:3], _unsized(_json_lines()[3] + b"\n")),
    "a frame of no size that inflates to 100 MB": lambda: _packed_shard(
        *_frames()[:3], _unsized(bytes(100 << 20))
    ),
    "a window of a gigabyte": lambda: _packed_shard(*_frames()[:3], _windowed(_json_lines()[3] + b"\n")),
    "a window of 2**41": lambda: _packed_shard(*_frames()[:3], _windowed(_json_lines()[3] + b"\n", 41)),
    "an empty frame": lambda: _packed_shard(*_frames()[:3], zstandard.compress(b"")),
    "a frame of two lines": lambda: _packed_shard(
        *_frames()[:2], zstandard.compress(b"".join(x + b"\n" for x in _json_lines()[2:]))
    ),
    "skippable frames": lambda: _packed_shard(*_frames(), b"\x50\x2a\x4d\x18\x04\0\0\0abcd"),
    "a frame with a dictionary": lambda: _packed_shard(
        *_frames()[:3], b"\x28\xb5\x2f\xfd\x23\x07\x07\x01\0\0"
    ),
    "nothing but magic": lambda: _packed_shard(b"\x28\xb5\x2f\xfd" * 1000),
    "random bytes": lambda: _packed_shard(np.random.default_rng(2).bytes(5000)),
}
for _name, _shard in _PACKED_SHARDS.items():
    add(f"packed JSON shard: {_name}", lambda f, s=_shard: s()(f), "dataset")

# ---- schemas and headers ----


def _schema_file(text: bytes) -> Make:
    """A data set whose one schema file holds something else."""

    def make(folder: Path) -> None:
        save(
            folder,
            {path: text if path.startswith("_schema/") else data for path, data in json_files().items()},
        )

    return make


_SCHEMAS: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"nonsense",
    "a list": b"[]",
    "a number of 5,000 digits": b"1" * 5000,
    "lists 100,000 deep": b"[" * 100_000 + b"]" * 100_000,
    "2 million lists": b'{"format":0,"x":[' + b"[]," * 2_000_000 + b"[]]}",
    "20 million numbers": b'{"format":0,"x":[' + b"0," * 20_000_000 + b"0]}",
    "another format": b'{"format":1}',
    "a format of infinity": b'{"format":1e999}',
    "NaN": b'{"format":NaN}',
    "group_rows of infinity": b'{"columns":{},"format":0,"group_rows":1e999,"multi_agent":false,'
    b'"policies":{},"stored":{}}',
}
for _name, _text in _SCHEMAS.items():
    add(f"schema file: {_name}", _schema_file(_text), "dataset")


def _other_schema(change: Callable[[Any], object]) -> Make:
    """A JSON shard whose lines and file agree on a schema of another kind."""

    def make(folder: Path) -> None:
        (old,) = (data for path, data in json_files().items() if path.startswith("_schema/"))
        described = json.loads(old)
        change(described)
        text = canonical_json(described)
        try:
            name = Schema.from_text(text).hash
        except ValueError:
            name = "0123456789abcdef"
        lines = [_edited(line, lambda found: found.update(schema=name)) for line in _json_lines()]
        save_shard(folder, b"".join(line + b"\n" for line in lines), suffix="jsonl", schema=text)

    return make


_OTHER_SCHEMAS: dict[str, Callable[[Any], object]] = {
    "rows of 2**40 values": lambda s: s["columns"]["obs"].update(shape=[1 << 40], kind="bytes"),
    "rows of 256 MB": lambda s: s["columns"]["obs"].update(shape=[1 << 26], kind="bytes"),
    "rows of 2**62 nothings": lambda s: s["columns"]["obs"].update(shape=[0, 1 << 62], kind="none"),
    "40 axes": lambda s: s["columns"]["obs"].update(shape=[1] * 40),
    "a negative axis": lambda s: s["columns"]["obs"].update(shape=[-3]),
    "a dtype of pointers": lambda s: s["columns"]["obs"].update(dtype="|O"),
    "a dtype of fields": lambda s: s["columns"]["obs"].update(dtype="<f4,<f4"),
    "a dtype of dates in attoseconds": lambda s: s["columns"]["obs"].update(dtype="<m8[as]", kind="bytes"),
    "an unknown kind": lambda s: s["columns"]["obs"].update(kind="pickle"),
    "5,000 columns": lambda s: s["columns"].update({f"x{i}": s["columns"]["obs"] for i in range(5000)}),
    "5,000 policies": lambda s: s["policies"].update(
        {f"p{i}": s["policies"]["default_policy"] for i in range(5000)}
    ),
    "no policy": lambda s: s.update(policies={}),
    "a path of 20": lambda s: s["policies"]["default_policy"].update(columns=[["obs", ["a"] * 20, "obs"]]),
    "a column named by a list": lambda s: s["policies"]["default_policy"].update(
        columns=[[["obs"], [], "obs"]]
    ),
    "one leaf twice": lambda s: s["policies"]["default_policy"].update(columns=[["obs", [], "obs"]] * 2),
}
for _name, _other in _OTHER_SCHEMAS.items():
    add(f"schema: {_name}", _other_schema(_other), "dataset")

_HEADERS: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"nonsense",
    "a list": b"[]",
    "two megabytes": b" " * (2 << 20) + b'{"format":0}',
    "lists 30,000 deep": b"[" * 30_000,
    "another format": b'{"format": 7}',
    "a format that is text": b'{"format":"0"}',
    "a format of 5,000 digits": b'{"format":' + b"9" * 5000 + b"}",
    "UTF-16": '{"format": 0}'.encode("utf-16"),
    "true": b'{"format": true}',
}
for _name, _text in _HEADERS.items():
    add(f"header: {_name}", lambda f, t=_text: save(f, {**json_files(), "_rlio.json": t}), "dataset")

# ---- Parquet shards ----


def _raw_footer(footer: bytes) -> Make:
    """The small shard with these bytes for its footer."""

    def make(folder: Path) -> None:
        data = shard_of(parquet_files())
        pages = data[: len(data) - len(footer_of(data))]
        save_shard(folder, pages + footer + struct.pack("<I", len(footer)) + b"PAR1")

    return make


def _set(key: str, text: str | bytes) -> Callable[[dict[str, Any]], object]:
    return lambda entries: entries.update({key: text})


def _streams(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    def forge(entries: dict[str, Any]) -> None:
        table = json.loads(zstandard.decompress(base64.b64decode(entries["rlio.streams"])))
        change(table)
        entries["rlio.streams"] = base64.b64encode(zstandard.compress(json.dumps(table).encode()))

    return forge


_ENTRIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no metadata": lambda found: found.clear(),
    "no schema": lambda found: found.pop("rlio.schema"),
    "no row groups": _set("rlio.groups", "[]"),
    "a list of row groups 3 million deep": _set("rlio.groups", "[" * 3_000_000),
    "row groups of 10**18": _set("rlio.groups", "[[0,1000000000000000000,0,1,1,1]]"),
    "row groups of infinity": _set("rlio.groups", "[[0,1e999,0,1,1,1]]"),
    "a schema of 2 million lists": _set("rlio.schema", "[" + "[]," * 2_000_000 + "[]]"),
    "a schema 100,000 deep": _set("rlio.schema", "[" * 100_000),
    "provenance of 2 million lists": _set("rlio.provenance", "[" + "[]," * 2_000_000 + "[]]"),
    "streams that inflate to 300 MB": lambda found: found.update(
        {"rlio.streams": base64.b64encode(_zstd_zeros(300 << 20))}
    ),
    "streams of 20 million lists": lambda found: found.update(
        {"rlio.streams": base64.b64encode(zstandard.compress(b'{"policy":[' + b"[]," * 20_000_000 + b"[]]}"))}
    ),
    "streams of 20 million numbers": lambda found: found.update(
        {"rlio.streams": base64.b64encode(zstandard.compress(b'{"policy":[' + b"0," * 20_000_000 + b"0]}"))}
    ),
    "streams of numbers": _streams(lambda t: t.update(policy=[1] * len(t["policy"]))),
    "streams of lists": _streams(lambda t: t.update(eps_id=[[1]] * len(t["policy"]))),
    "streams that end somehow": _streams(lambda t: t.update(end=["x"] * len(t["policy"]))),
    "streams of unlike lengths": _streams(lambda t: t["rows"].append(1)),
    "fewer streams": _streams(lambda t: t.update({k: v[:1] for k, v in t.items()})),
}

_RAW_FOOTERS: dict[str, bytes] = {
    "nothing": b"",
    "one byte": b"\0",
    "zeros": bytes(1000),
    "ones": b"\xff" * 1000,
    "random bytes": np.random.default_rng(3).bytes(3000),
    "a list of a billion structs": b"\x29\xfc\xff\xff\xff\xff\x03",
    "a text of 2**35 bytes": b"\x18\xff\xff\xff\xff\x7f",
    "an integer that never ends": b"\x15" + b"\x80" * 500,
    "structs 500 deep": b"\x1c" * 500,
    "lists 500 deep": b"\x19" + b"\x19" * 500,
    "a map of 2**31 pairs": b"\x1b\xff\xff\xff\xff\x07\x88",
    "5 million booleans": b"\xf9" + b"\x11" * 5_000_000,
}
for _name, _raw in _RAW_FOOTERS.items():
    add(f"Parquet footer: {_name}", _raw_footer(_raw), "dataset")


def _cut_footer(folder: Path) -> None:
    footer = footer_of(shard_of(parquet_files()))
    _raw_footer(footer[: len(footer) // 2])(folder)


add("Parquet footer: cut in half", _cut_footer, "dataset")


def _tail(length: bytes, magic: bytes) -> Make:
    """The small shard with another length of the footer, or another magic."""
    return lambda folder: _save_named(folder, shard_of(parquet_files())[:-8] + length + magic)


def _save_named(folder: Path, data: bytes, rows: int = 30) -> None:
    """A shard under a name whose CRC of the footer is that of the small one's."""
    crc = zlib.crc32(footer_of(shard_of(parquet_files())))
    name = ShardName(first=0, rows=rows, size=len(data), crc32=zlib.crc32(data), footer_crc32=crc)
    kept = {path: text for path, text in parquet_files().items() if not path.startswith("data/")}
    save(folder, {**kept, f"data/{WRITER}/{name.format()}": data})


add("Parquet: a footer of length 0", _tail(bytes(4), b"PAR1"), "dataset")
add("Parquet: a footer of 2 GB", _tail(b"\xff\xff\xff\x7f", b"PAR1"), "dataset")
add("Parquet: a footer of 4 GB", _tail(b"\xff\xff\xff\xff", b"PAR1"), "dataset")
add("Parquet: encrypted by its magic", _tail(b"\x10\0\0\0", b"PARE"), "dataset")
add("Parquet: no footer", lambda f: _save_named(f, shard_of(parquet_files())[:200]), "dataset")
add("Parquet: four bytes", lambda f: _save_named(f, b"PAR1"), "dataset")
add("Parquet: random bytes", lambda f: _save_named(f, np.random.default_rng(4).bytes(9000)), "dataset")


def _table_case(change: Callable[[pa.Table], pa.Table], **more: Any) -> Make:
    def make(folder: Path) -> None:
        data, rows, schema = forged_table(change, **more)
        save_shard(folder, data, rows=rows, schema=schema)

    return make


def _one_text(name: str, text: str, rows: int) -> Callable[[pa.Table], pa.Table]:
    """``rows`` rows with one text, stored once."""
    return lambda table: replaced(
        replaced(
            _linked(repeated(table, rows)),
            name,
            pa.array([text] * 1).take(pa.array(np.zeros(rows, np.int32)))
            if len(text) < 100
            else pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([text])),
        ),
        "_next",
        [0] * rows,
    )


def _linked(table: pa.Table) -> pa.Table:
    """The table with a new_obs in every row, as ``_next`` of zeros says."""
    return replaced(table, "_new_obs", [[0.0] * 3] * len(table))


_TABLES: dict[str, tuple[Callable[[pa.Table], pa.Table], dict[str, Any]]] = {
    "a text of a megabyte in 65,536 rows": (
        _one_text("label", "x" * (1 << 20), 65_536),
        {"compression": "zstd"},
    ),
    "an info of a megabyte in 65,536 rows": (
        _one_text("infos", '"' + "x" * (1 << 20) + '"', 65_536),
        {"compression": "zstd"},
    ),
    "infos of 300,000 lists in 65,536 rows": (
        _one_text("infos", "[" + "[]," * 300_000 + "[]]", 65_536),
        {"compression": "zstd"},
    ),
    "a text of 20 MB beside 60,000": (
        lambda t: replaced(
            replaced(_linked(repeated(t, 60_000)), "label", ["x" * (20 << 20)] + ["y"] * 59_999),
            "_next",
            [0] * 60_000,
        ),
        {"compression": "zstd"},
    ),
    "rows that say they link out of the group": (
        lambda t: replaced(t, "_next", [k and 2**30 for k in t["_next"].to_pylist()]),
        {},
    ),
    "a stream that there is not": (lambda t: replaced(t, "_stream", [99] * len(t)), {}),
    "lists of another length": (lambda t: replaced(t, "obs", [[1.0] * 4] * len(t)), {}),
    "lists of unlike lengths that add up": (
        lambda t: replaced(t, "obs", [[1.0] * 2, [1.0] * 4] * (len(t) // 2)),
        {},
    ),
    "infos that are no JSON": (lambda t: replaced(t, "infos", ["nonsense"] * len(t)), {}),
    "infos nested 900 deep": (lambda t: replaced(t, "infos", ["[" * 900 + "]" * 900] * len(t)), {}),
    "infos whose keys collide": (
        lambda t: replaced(
            t, "infos", [json.dumps({"$map": [[i * (2**61 - 1), 0] for i in range(20_000)]})] * len(t)
        ),
        {},
    ),
    "batches that are no JSON": (lambda t: replaced(t, "_batch", ["nonsense"] * len(t)), {}),
    "an Arrow schema that Arrow wrote": (lambda t: t, {"store_schema": True}),
    "a column that may be absent": (
        lambda t: replaced(t, "actions", t["actions"].combine_chunks(), nullable=True),
        {},
    ),
    "a column of another name": (
        lambda t: t.rename_columns(["evil" if name == "actions" else name for name in t.column_names]),
        {},
    ),
    "a column more": (lambda t: t.append_column("evil", t["actions"]), {}),
    "rows of 200 MB": (
        lambda t: t,
        {
            "schema": lambda s: [
                s["columns"][name].update(shape=[50 << 20], kind="bytes") for name in ("obs", "_new_obs")
            ]
        },
    ),
}
for _name, (_table, _options) in _TABLES.items():
    add(f"Parquet shard: {_name}", _table_case(_table, **_options), "dataset")
for _name, _change in _ENTRIES.items():
    add(f"Parquet footer: {_name}", _table_case(lambda t: t, entries=_change), "dataset")
add(
    "Parquet shard: rewritten by another writer",
    _table_case(lambda t: t, use_dictionary=False, compression="snappy"),
    "dataset",
    rows=30,
    harmless=True,
)
add(
    "Parquet shard: in other encodings",
    _table_case(
        lambda t: t,
        use_dictionary=False,
        compression="gzip",
        data_page_version="2.0",
        column_encoding={"label": "DELTA_LENGTH_BYTE_ARRAY", "t": "DELTA_BINARY_PACKED"},
    ),
    "dataset",
    rows=30,
    harmless=True,
)


# ---- Parquet files of others ----


def _foreign(table: pa.Table | Callable[[], pa.Table], **options: Any) -> Make:
    def make(folder: Path) -> None:
        pq.write_table(table if isinstance(table, pa.Table) else table(), folder / "a.parquet", **options)

    return make


def _spread(text: str, rows: int) -> pa.Table:
    array = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([text]))
    return pa.table({"label": array, "rewards": np.zeros(rows)})


add(
    "foreign Parquet: a text of 66 kB in 100,000 rows, which are 6.6 GB",
    _foreign(lambda: _spread("x" * 66_000, 100_000), compression="zstd"),
    "foreign",
    options=(("group_bytes", 32 << 20),),
)
add(
    "foreign Parquet: 17 million rows in one row group",
    _foreign(lambda: pa.table({"rewards": np.zeros(17_000_000, np.int8)}), row_group_size=17_000_000),
    "foreign",
)
add(
    "foreign Parquet: 16 MB of zeros, a little at a time",
    _foreign(lambda: pa.table({"rewards": np.zeros(2_000_000)}), compression="zstd", row_group_size=200_000),
    "foreign",
    rows=2_000_000,
    harmless=True,
)
add(
    "foreign Parquet: two columns of one name",
    _foreign(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])),
    "foreign",
)
add(
    "foreign Parquet: 20,000 columns",
    _foreign(lambda: pa.table({"rewards": [1.0]} | {f"c{i}": [1.0] for i in range(20_000)})),
    "foreign",
)
for _name, _raw in _RAW_FOOTERS.items():
    add(
        f"foreign Parquet footer: {_name}",
        lambda f, r=_raw: save(
            f, {"a.parquet": b"PAR1" + bytes(100) + r + struct.pack("<I", len(r)) + b"PAR1"}
        ),
        "foreign",
    )


def _columns_case(count: int, **columns: list[Any]) -> Make:
    """A Parquet file of ``count`` columns alike, besides others."""
    ((_, values),) = columns.items()
    made = {f"c{i}": values for i in range(count)} | {"rewards": [1.0] * len(values)}
    return lambda folder: pq.write_table(pa.table(made), folder / "a.parquet", compression="zstd")


def _foreign_case(make: Callable[[], Make]) -> Make:
    return lambda folder: make()(folder)


_SMALL = (("group_bytes", 64 << 20), ("packed_values", 100_000))
for _name, _small in {
    "a packed list that names an array 500 times": lambda: _columns_case(1, c=[_many_mentions().decode()]),
    "ten packed columns of 10 MB": lambda: _columns_case(
        10, c=[_packed(pickle.dumps(np.zeros(10 << 20, np.uint8), 5)).decode()]
    ),
    "100,000 rows that repeat a packed text": lambda: _columns_case(
        1, c=[_packed(pickle.dumps(np.zeros(4096), 5)).decode()] * 100_000
    ),
    "rows of 100,000 opcodes": lambda: _columns_case(
        1, c=[_many_opcodes(50_000 + i).decode() for i in range(8)]
    ),
    "a packed row with a text of a megabyte in a list of many": lambda: _columns_case(
        1, c=[_packed(pickle.dumps(["x" * (1 << 20)] + ["y"] * 20_000, 4)).decode()]
    ),
    "packed rows of shape (10**9, 0)": lambda: _columns_case(
        1, c=[_packed(pickle.dumps(np.empty((10**9, 0)), 5)).decode()]
    ),
}.items():
    add(f"foreign Parquet: {_name}", _foreign_case(_small), "foreign", options=_SMALL)
add("foreign Parquet: an empty file", _whole(b"", "a.parquet"), "foreign")
add("foreign Parquet: encrypted", _whole(b"PARE" + bytes(100) + b"PARE", "a.parquet"), "foreign")
add(
    "foreign Parquet: a footer of 2 GB",
    _whole(b"PAR1" + bytes(20) + b"\xff\xff\xff\x7fPAR1", "a.parquet"),
    "foreign",
)


# ---- folders ----


def _with(change: Callable[[Path, Path], object]) -> Make:
    """The JSON data set, and something done to it: given the root and the folder of the writer."""

    def make(folder: Path) -> None:
        root = folder / "root"
        save(root, json_files())
        change(root, root / "data" / WRITER)

    return make


def _shard_path(home: Path) -> Path:
    return next(path for path in home.iterdir() if ShardName.parse(path.name))


def _moved_out(root: Path, home: Path) -> None:
    """The shard lies outside of the root, and a link leads there."""
    shard = _shard_path(home)
    secret = root.parent / "secret"
    secret.mkdir()
    shard.rename(secret / shard.name)
    shard.symlink_to(secret / shard.name)


def _linked_folder(root: Path, home: Path) -> None:
    (root.parent / "secret").mkdir()
    home.rename(root.parent / "secret" / WRITER)
    home.symlink_to(root.parent / "secret" / WRITER)


def _linked_data(root: Path, home: Path) -> None:
    (root / "data").rename(root.parent / "secret")
    (root / "data").symlink_to(root.parent / "secret")


def _linked_schema(root: Path, home: Path) -> None:
    (root / "_schema").rename(root.parent / "secret")
    (root / "_schema").symlink_to(root.parent / "secret")


def _linked_header(root: Path, home: Path) -> None:
    (root / "_rlio.json").rename(root.parent / "secret")
    (root / "_rlio.json").symlink_to(root.parent / "secret")


def _loop(root: Path, home: Path) -> None:
    shard = _shard_path(home)
    name = shard.name
    shard.unlink()
    (home / name).symlink_to(home / name)


def _in_place(put: Callable[[Path], object]) -> Callable[[Path, Path], object]:
    """Something else under the shard's name."""

    def change(root: Path, home: Path) -> None:
        shard = _shard_path(home)
        shard.unlink()
        put(shard)

    return change


def _socket(path: Path) -> None:
    """A socket's own path is short, whatever that of the folder is."""
    here = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)


def _renamed(change: Callable[[ShardName], str]) -> Callable[[Path, Path], object]:
    def rename(root: Path, home: Path) -> None:
        shard = _shard_path(home)
        name = ShardName.parse(shard.name)
        assert name is not None
        shard.rename(home / change(name))

    return rename


def _named(name: ShardName, **changed: Any) -> str:
    parts = {
        slot: getattr(name, slot) for slot in ("first", "rows", "size", "crc32", "footer_crc32")
    } | changed
    crcs = f"{parts['crc32']:08x}-{parts['footer_crc32']:08x}"
    return f"{parts['first']:012d}-{parts['rows']}-{parts['size']}-{crcs}.{name.suffix}"


_FOLDERS: dict[str, Callable[[Path, Path], object]] = {
    "a shard that is a link out of the root": _moved_out,
    "a writer's folder that is a link": _linked_folder,
    "a data folder that is a link": _linked_data,
    "a schema folder that is a link": _linked_schema,
    "a header that is a link": _linked_header,
    "a link to itself": _loop,
    "a pipe named like a shard": _in_place(os.mkfifo),
    "a folder named like a shard": _in_place(os.mkdir),
    "a socket named like a shard": _in_place(_socket),
    "a device named like a shard": _in_place(lambda path: path.symlink_to("/dev/zero")),
    "a header that is a pipe": lambda root, _: [
        (root / "_rlio.json").unlink(),
        os.mkfifo(root / "_rlio.json"),
    ],
    "a header that is a folder": lambda root, _: [
        (root / "_rlio.json").unlink(),
        (root / "_rlio.json").mkdir(),
    ],
    "a schema that is a pipe": lambda root, _: [
        (path.unlink(), os.mkfifo(path)) for path in list((root / "_schema").iterdir())
    ],
    "a size that lies": _renamed(lambda n: _named(n, size=n.size + 1)),
    "a CRC that lies": _renamed(lambda n: _named(n, crc32=n.crc32 ^ 1, rows=31)),
    "rows that lie": _renamed(lambda n: _named(n, rows=10**6)),
    "rows of 2**48": _renamed(lambda n: _named(n, rows=2**48)),
    "a first row of 10**18": _renamed(lambda n: _named(n, first=10**18)),
    "a first row of 5": _renamed(lambda n: _named(n, first=5)),
    "numbers in other scripts": _renamed(lambda n: _named(n).replace("0", "\u0660", 1)),
    "rows of 10**18": _renamed(lambda n: _named(n, rows=10**18)),
    "a writer's name with capitals": lambda root, home: home.rename(root / "data" / "W00000"),
    "a writer's name of 65": lambda root, home: home.rename(root / "data" / ("w" * 65)),
    "sealed for 2**60 rows": lambda root, home: (home / f"_sealed-{2**60}").write_bytes(b""),
    "trimmed of all rows and more": lambda root, home: (home / f"_trim-{2**60}").write_bytes(b""),
    "no writer": lambda root, home: [_shard_path(home).unlink()],
}
# What a name or a marker makes none of ours is passed over: it says nothing, so that nothing is missing.
_PASSED_OVER = (
    *("a writer's folder that is a link", "a data folder that is a link", "trimmed of all rows and more"),
    *("a writer's name with capitals", "a writer's name of 65"),
)
for _name, _do in _FOLDERS.items():
    gone = _name in _PASSED_OVER
    add(f"folder: {_name}", _with(_do), "dataset", harmless=gone, rows=0 if gone else None)


def _extra(root: Path, home: Path) -> None:
    """What does not concern us: names of no shard, some of them hostile."""
    for name in (
        "..shard",
        "a\nb",
        "-rf",
        "\u202egnp",
        "_tmp",
        "_sealed-x",
        "_trim--1",
        "x" * 255,
        "0-0-0-0-0.parquet",
    ):
        (home / name).write_bytes(b"x")
    (root / "data" / "..." / "x").mkdir(parents=True)
    (home / "deep" / "folder").mkdir(parents=True)
    os.link(_shard_path(home), home / "hardlink")


add("folder: names that are none of ours", _with(_extra), "dataset", rows=30, harmless=True)
add(
    "folder: the same rows under two names",
    _with(
        lambda root, home: [
            (home / _shard_path(home).name.lstrip("0").rjust(10, "0")).write_bytes(
                _shard_path(home).read_bytes()
            )
        ]
    ),
    "dataset",
    rows=30,
    harmless=True,
)
add(
    "folder: 300 names where 100 are allowed",
    _with(lambda root, home: [(home / f"x{i}").write_bytes(b"") for i in range(300)]),
    "dataset",
    options=(("listed_names", 100),),
)


def cases() -> Iterator[Case]:
    """The corpus."""
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    return iter(CASES)
