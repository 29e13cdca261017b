"""Finds Minari's remote data sets by their ids.

Minari keeps data sets on Hugging Face: ``D4RL/pen/human-v2`` is the folder ``pen/human-v2`` of the repository
``D4RL`` of ``farama-minari``. The environment variable ``MINARI_REMOTE`` names another owner or store.
"""

from __future__ import annotations

import os
import re
from typing import Final

from rlio.errors import DataNotFound, MissingExtra, StoreError, UnknownName, excerpt
from rlio.storage import Retry, Storage

__all__ = ["uri_of_id"]

#: A namespace, a name, and a version, without which a path looks alike.
_ID: Final = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)+-v[0-9]+")
_REMOTE: Final = "hf://farama-minari"
_SECONDS: Final = 20.0


def uri_of_id(text: str) -> str | None:
    """The URI of a remote data set; None: ``text`` is no id, or a path in a folder that exists.

    Raises:
        DataNotFound: The store has no such data set, or cannot be reached.
    """
    if not _ID.fullmatch(text) or os.path.exists(text.partition("/")[0]):
        return None
    scheme, _, name = os.environ.get("MINARI_REMOTE", _REMOTE).rstrip("/").partition("://")
    scheme, name = {"hf": ("hf", f"datasets/{name}"), "gcp": ("gs", name)}.get(scheme, (scheme, name))
    uri = f"{scheme}://{name}/{text}"
    try:
        found = Storage.open(uri, retry=Retry(attempts=1), timeout=_SECONDS).exists("data/metadata.json")
    except (StoreError, UnknownName, MissingExtra) as error:
        raise DataNotFound(
            f"there is no such path; if {excerpt(text)} is an id of Minari, download it (minari download "
            f"{text}), or make its store reachable for fsspec (pip install huggingface_hub): {error}",
            uri=uri,
        ) from error
    if not found:
        raise DataNotFound(
            f"there is no such path, and Minari's store has no data set {excerpt(text)}", uri=uri
        )
    return uri
