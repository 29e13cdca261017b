"""Network addresses of this machine, for processes that must find each other.

Example:
    >>> 1024 <= find_free_port() <= 65535
    True
"""

from __future__ import annotations

import socket

__all__ = ["find_free_port", "get_host", "get_node_ip"]


def get_host() -> str:
    """The machine's host name."""
    return socket.gethostname()


def get_node_ip() -> str:
    """The address at which other machines reach this one, if known; 127.0.0.1 without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: connect() only selects the interface that would send. The address is reserved for
            # documentation (RFC 5737).
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def find_free_port(host: str = "") -> int:
    """A TCP port that is free now. Another program may take it before you do.

    Args:
        host: Address to listen on; ``""``: all addresses of this machine.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
