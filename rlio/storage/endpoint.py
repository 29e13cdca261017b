"""Identifies the server of a store, by words that are equal if the server is.

URLs such as ``s3://bucket/run`` are the same on every server that speaks S3. The client's options, its
environment and its configuration distinguish such stores. Secrets are excluded, because they change.

Example:
    >>> normal_endpoint("HTTPS://Minio.Example:443/"), normal_endpoint("https://s3.amazonaws.com")
    ('https://minio.example', '')
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from rlio.storage.clients import protocols_of
from rlio.storage.filesystem import Storage

__all__ = ["endpoint_of", "normal_endpoint"]

# The options that name a server in fsspec's clients; the first two are URLs.
_URLS: Final = ("endpoint_url", "endpoint")
_NAMES: Final = ("account_name", "account_host", "host", "port")
_PORTS: Final = {"http": 80, "https": 443}
#: Default ports, which carry no information: those of SFTP and FTP.
_USUAL: Final = {"sftp": "22", "ssh": "22", "ftp": "21"}
#: Default servers of clients: all servers of one provider share their bucket names.
_DEFAULTS: Final = re.compile(r"https?://(s3([.-][a-z0-9.-]+)?\.amazonaws\.com|storage\.googleapis\.com)")


def endpoint_of(storage: Storage) -> list[str]:
    """The server of a store as ``name=value`` texts, which distinguish stores of equal URLs; no secrets.

    Empty for local folders, and for a client's default server.
    """
    if storage.is_local:
        return []
    fs = storage.fs
    protocols = set(protocols_of(fs))
    options = dict(getattr(fs, "storage_options", None) or {})
    inner = options.get("client_kwargs")
    # Clients use the outer option, unless it is None.
    given = {**(inner if isinstance(inner, dict) else {})}
    given.update({name: value for name, value in options.items() if value is not None})
    found = {name: normal_endpoint(str(given[name])) for name in _URLS if isinstance(given.get(name), str)}
    found |= {name: str(given[name]).lower() for name in _NAMES if isinstance(given.get(name), str | int)}
    if not any(name in found for name in _URLS):
        found["endpoint_url"] = normal_endpoint(_from_surroundings(protocols, options))
    if "abfs" in protocols:
        found |= _azure(fs)
    if found.get("port") in {_USUAL[name] for name in protocols if name in _USUAL}:
        del found["port"]
    return [f"{name}={found[name]}" for name in (*_URLS, *_NAMES) if found.get(name)]


def normal_endpoint(url: str) -> str:
    """The URL of a server in one normal spelling; "" for the public servers of AWS and Google."""
    url = url.strip()
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        host, port = parts.hostname or "", parts.port
    except ValueError:  # Not a URL: the client will report it.
        return url
    scheme = parts.scheme.lower()
    if ":" in host:
        host = f"[{host}]"
    if port is not None and port != _PORTS.get(scheme):
        host = f"{host}:{port}"
    normal = (f"{scheme}://" if scheme else "") + host + parts.path.rstrip("/")
    return "" if _DEFAULTS.fullmatch(normal) else normal


def _from_surroundings(protocols: set[str], options: Mapping[str, Any]) -> str:
    """The server that a client takes from its environment or its configuration files; "" for none."""
    if "s3" in protocols:
        return _aws_endpoint(options)
    if protocols & {"gs", "gcs"}:
        return os.environ.get("STORAGE_EMULATOR_HOST", "")
    return ""


def _aws_endpoint(options: Mapping[str, Any]) -> str:
    """The server that botocore uses by default: from two variables, then from ``~/.aws/config``."""
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    try:
        import botocore.session
        from botocore.configprovider import ConfiguredEndpointProvider
        from botocore.exceptions import BotoCoreError
    except ImportError:  # A client other than s3fs.
        return named
    config = options.get("config_kwargs")
    if isinstance(config, dict) and config.get("ignore_configured_endpoint_urls"):
        return ""
    session = botocore.session.Session(profile=options.get("profile"))
    try:
        if session.get_config_variable("ignore_configured_endpoint_urls"):
            return ""
        provider = ConfiguredEndpointProvider(
            full_config=session.full_config, scoped_config=session.get_scoped_config(), client_name="s3"
        )
        return str(provider.provide() or "")
    except BotoCoreError:  # A file is unreadable or lacks the profile: the client will report it.
        return named


def _azure(fs: Any) -> dict[str, str]:
    """The account, which the options, the environment or a connection string may name."""
    text = getattr(fs, "connection_string", None)
    fields = dict(part.split("=", 1) for part in text.split(";") if "=" in part) if text else {}
    named = {name.lower(): value for name, value in fields.items()}
    account = named.get("accountname") or getattr(fs, "account_name", None) or ""
    found = {"account_name": str(account).lower()}
    if "blobendpoint" in named:
        found["endpoint_url"] = normal_endpoint(named["blobendpoint"])
    return found
