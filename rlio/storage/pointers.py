"""Pointers of Git LFS: small files that `git clone` leaves in the place of large ones without LFS."""

from __future__ import annotations

from typing import Final

from rlio.errors import UnknownLayout

__all__ = ["POINTER_BYTES", "refuse_pointer"]

# The specification of Git LFS: a pointer begins with this line, and has less than 1024 bytes.
_POINTER: Final = b"version https://git-lfs.github.com/spec/v1"
POINTER_BYTES: Final = 1024


def refuse_pointer(start: bytes, *, uri: str) -> None:
    """Raise if the beginning of a file is that of a pointer of Git LFS, which `git clone` leaves without LFS.

    Raises:
        UnknownLayout: It is. The data are elsewhere, and not damaged: ``on_error="skip"`` skips no pointer.
    """
    if start.startswith(_POINTER):
        raise UnknownLayout(
            "found a pointer of Git LFS, expected the file that it stands for: run  git lfs install && "
            "git lfs pull  in the checkout, which fetches the files",
            uri=uri,
        )
