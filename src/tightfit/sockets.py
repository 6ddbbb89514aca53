"""Reading from sockets."""

from __future__ import annotations

import contextlib
import socket

__all__ = ["received"]


def received(connection: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes; fewer where the other side has ended, or did not answer in time."""
    said = b""
    with contextlib.suppress(OSError):
        while len(said) < size and (more := connection.recv(size - len(said))):
            said += more
    return said
