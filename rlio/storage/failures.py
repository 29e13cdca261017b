"""Interprets failed calls of a filesystem: whether a retry can help, and what hides behind "not found".

Clients report the same fault in many ways: as the number of an `OSError`, an HTTP status, a reply of an FTP
server, or their own class. Some report every failure as a missing file.

Example:
    >>> is_permanent(PermissionError(13, "denied")), is_permanent(ConnectionResetError(104, "reset"))
    (True, False)
"""

from __future__ import annotations

import contextlib
import errno
import ftplib
from collections.abc import Iterator

from rlio.errors import RlioError, StoreError, StoreRefused, StoreTimeout
from rlio.storage.paths import mask_secrets

__all__ = ["behind_not_found", "explained", "is_permanent", "store_error"]

# Errors that a retry cannot change.
_PERMANENT = (
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    PermissionError,
    RlioError,
    TypeError,
    UnicodeError,
    ftplib.error_perm,
)
_PERMANENT_CODES = frozenset(
    {errno.ENOSPC, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, getattr(errno, "EDQUOT", errno.ENOSPC)}
)
# By name, because importing the clients would take seconds: missing or wrong credentials.
_PERMANENT_NAMES = frozenset(
    {
        "AuthenticationException",  # paramiko
        "BadHostKeyException",
        "ClientAuthenticationError",  # azure
        "NoCredentialsError",  # botocore
        "ParamValidationError",
        "PartialCredentialsError",
        "ProfileNotFound",
        "DefaultCredentialsError",  # google
    }
)
_REFUSED_NAMES = _PERMANENT_NAMES - {"ParamValidationError"}

# Temporary ones among the statuses that blame the client: timeout, conflict with another call, locked, too
# early, too many requests. (AWS: "409 ConditionalRequestConflict: retry the upload".)
_PASSING_STATUSES = frozenset({408, 409, 423, 425, 429})
# S3 answers 400 if the body was damaged or cut on its way.
_PASSING_S3_CODES = frozenset({"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"})


def is_permanent(error: BaseException) -> bool:
    """Whether the same call would fail again at once: wrong name, rights, credentials or request."""
    for cause in _chain(error):
        if isinstance(cause, StoreError) and cause.__cause__ is not None:
            continue  # Its cause decides.
        if isinstance(cause, _PERMANENT) or type(cause).__name__ in _PERMANENT_NAMES:
            return True
        if isinstance(cause, OSError) and cause.errno in _PERMANENT_CODES:
            return True
        status, code = _http_status(cause)
        if code in _PASSING_S3_CODES:
            return False
        if status is not None:
            return (400 <= status < 500 and status not in _PASSING_STATUSES) or status == 501
    return False


def behind_not_found(error: FileNotFoundError) -> Exception | None:
    """The failure that a client reported as a missing file; None if the file is really missing.

    fsspec's FTP client reports every server error so, and its HTTP client even a server that is down. If
    those counted as "not found", an outage would look like an empty data set.
    """
    for cause in _chain(error, contexts=True):
        if isinstance(cause, ftplib.Error):
            return None if _is_ftp_not_found(str(cause), cause) else cause
        status, _ = _http_status(cause)
        if status is not None:
            if status not in (404, 410) and isinstance(cause, Exception):
                return cause
        elif _is_connection_error(cause) and isinstance(cause, Exception):
            return cause
    return None


def store_error(error: Exception, *, uri: str, attempts: int = 1) -> StoreError:
    """Convert an error of the system or of a client to a `StoreError`; raise the result from ``error``.

    Args:
        error: The error.
        uri: URI for the message.
        attempts: Number of attempts made.
    """
    refused = isinstance(error, PermissionError) or any(
        _http_status(cause)[0] in (401, 403)
        or type(cause).__name__ in _REFUSED_NAMES
        or (isinstance(cause, ftplib.error_perm) and str(cause).startswith("53"))
        for cause in _chain(error)
    )
    kind = StoreRefused if refused else StoreTimeout if isinstance(error, TimeoutError) else StoreError
    found = kind(
        f"the store failed after {attempts} attempts: {type(error).__name__}: {mask_secrets(str(error))}; "
        + ("check rights and credentials" if refused else "check that it is up and can be reached")
        + ", then call again",
        uri=uri,
    )
    found.errno = getattr(error, "errno", None)
    return found


@contextlib.contextmanager
def explained(uri: str) -> Iterator[None]:
    """Convert errors of clients and the system to `StoreError`s; rlio's own errors pass unchanged."""
    try:
        yield
    except RlioError:
        raise
    except Exception as error:
        raise store_error(error, uri=uri) from error


def _is_ftp_not_found(reply: str, error: ftplib.Error) -> bool:
    """Whether a server refused a name permanently (5xx), which servers report in many ways."""
    if not isinstance(error, ftplib.error_perm) or reply[:2] == "53":  # 53x: not logged in
        return False
    return not any(word in reply.lower() for word in ("denied", "privilege", "not permitted"))


def _is_connection_error(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError | EOFError):
        return True
    return any(
        cls.__name__ == "ClientError" and cls.__module__.startswith("aiohttp") for cls in type(error).__mro__
    )


def _chain(error: BaseException, *, contexts: bool = False) -> Iterator[BaseException]:
    """The error, its cause, and so on; with ``contexts``, also the errors being handled."""
    found: BaseException | None = error
    for _ in range(10):
        if found is None:
            return
        yield found
        found = found.__cause__ or (found.__context__ if contexts else None)


def _http_status(error: BaseException) -> tuple[int | None, str]:
    """The HTTP status in a client's exception, and S3's code, if any."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return (status if isinstance(status, int) else None), str(response.get("Error", {}).get("Code", ""))
    # azure.core; aiohttp; gcsfs (an int, or its text)
    for name in ("status_code", "status", "code"):
        status = getattr(error, name, None)
        if isinstance(status, int | str) and str(status).isdigit() and 100 <= int(status) < 600:
            return int(status), ""
    return None, ""
