"""Whether the indexes of sealed writers say what a whole listing says."""

from __future__ import annotations

from rlio.errors import CorruptData, DataNotFound
from rlio.maintenance.findings import Findings
from rlio.storage.filesystem import Storage
from rlio.storage.listing import Listing
from rlio.storage.sealed_index import (
    IndexFolder,
    SealedIndex,
    StoredIndex,
    list_index,
    load_change,
    load_index,
    place_of,
)

__all__ = ["check_index"]

#: Writers that one finding names.
_NAMED = 3


def check_index(storage: Storage, before: IndexFolder, listing: Listing, findings: Findings) -> None:
    """Compare every index that readers might use with a listing.

    Args:
        storage: The data set's root.
        before: What was under `INDEX_DIR` before ``listing`` was made.
        listing: Everything, as it was listed.
        findings: Takes what is found.
    """
    place = place_of(storage)
    for path in before.torn:
        findings.add("index-damaged", "it has another size than its name says", uri=storage.uri_of(path))
    for stored in before.indexes:
        uri = storage.uri_of(stored.object.path)
        if stored.place != place:
            findings.add(
                "index-elsewhere",
                "it was made at another place, or for another header: nobody uses it here",
                uri=uri,
            )
            continue
        try:
            index = load_index(storage, stored.object)
            differing = _differing(index, listing) - _changing(storage, before, index)
            # What was changed since was announced since.
            differing -= _changing(storage, list_index(storage), index) if differing else set()
        except DataNotFound:
            continue  # Replaced meanwhile.
        except CorruptData as error:
            findings.add_error("index-damaged", error, uri=uri)
            continue
        _tell(stored, differing, findings, uri=uri)


def _tell(stored: StoredIndex, differing: set[str], findings: Findings, *, uri: str) -> None:
    if differing:
        named = ", ".join(sorted(differing)[:_NAMED])
        findings.add(
            "index-differs",
            f"of {len(differing)} writers, such as {named}, it does not say what is stored, although nobody "
            "announced a change: remove it, and run `rlio compact` for another",
            uri=uri,
        )


def _differing(index: SealedIndex, listing: Listing) -> set[str]:
    """The writers of whose rows, or markers, the index says something else."""
    told = index.listing
    return {
        writer
        for writer in {*told.sealed, *told.passed_over}
        if _markers(told, writer) != _markers(listing, writer) or told.cover(writer) != listing.cover(writer)
    }


def _markers(listing: Listing, writer: str) -> tuple[int | None, int | None]:
    """How many rows a writer is sealed after, and the row of its trim; None where there is none."""
    passed = listing.passed_over.get(writer)
    if passed is not None:
        return passed.sealed, passed.trimmed
    return listing.sealed.get(writer), listing.trimmed.get(writer)


def _changing(storage: Storage, folder: IndexFolder, index: SealedIndex) -> set[str]:
    """The writers of which readers know that they must list them.

    Raises:
        CorruptData: An announcement is damaged.
    """
    found: set[str] = set()
    for nonce, stored in folder.changes.items():
        if nonce not in index.settled:
            found |= load_change(storage, stored)
    return found
