"""The storage layer: a folder on any filesystem, names that certify their content, commit and listing.

`filesystem` puts, reads and lists whole objects; `names` says what a shard is called; `publish` commits one;
`listing` finds what is committed and which rows serve. What the bytes of a shard mean is not known here.

Example:
    >>> from rlio.storage import ShardName, Storage, list_shards, put_shard
    >>> storage = Storage.open("memory://package-example")
    >>> name = ShardName(first=0, rows=4, size=4, crc32=0x0A8BF4A1, footer_crc32=0, suffix="jsonl")
    >>> ref = put_shard(storage, "w0", name, memoryview(b"rows"))
    >>> list_shards(storage).shards == {"w0": [ref]}
    True
"""

from rlio.storage.filesystem import Entry, InputFile, Retry, Storage, expand_inputs, open_input
from rlio.storage.listing import (
    Coverage,
    Listing,
    Segment,
    ShardRef,
    cover_rows,
    list_shards,
    load_shard,
)
from rlio.storage.names import ShardName, check_writer_id, make_writer_id
from rlio.storage.publish import put_header, put_shard, read_header

__all__ = [
    "Coverage",
    "Entry",
    "InputFile",
    "Listing",
    "Retry",
    "Segment",
    "ShardName",
    "ShardRef",
    "Storage",
    "check_writer_id",
    "cover_rows",
    "expand_inputs",
    "list_shards",
    "load_shard",
    "make_writer_id",
    "open_input",
    "put_header",
    "put_shard",
    "read_header",
]
