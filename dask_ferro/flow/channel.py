"""Send values of flows between workers: a TCP connection for each direction, with the cluster's TLS.

    token | message | message | ...          message: number of parts | bytes of each | parts

The first two parts are the pickles of a name and of a value, the others are the value's buffers.  A connection without
the cluster's token is closed before anything is unpickled.  The thread that computes a value sends it, and blocks while
the receiver's queue is full; a receiver stores what arrives and never blocks, so no two workers wait for each other.
"""

from __future__ import annotations

import hmac
import logging
import pickle
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from io import BufferedReader
from time import sleep
from typing import Any, cast

import numpy as np
from distributed.protocol.pickle import dumps

logger = logging.getLogger(__name__)

# Seconds until a connection is abandoned and messages use Dask's own connections.
CONNECTS = 1.0
# Milliseconds until a message that no host confirms is abandoned.
_GIVES_UP_MS = 30_000
# Seconds until a listener without a file descriptor for a connection tries again.
_RETRY_S = 0.1
# Messages up to this size in bytes are sent in one piece.
_JOIN_BYTES = 1 << 16
_COUNT = struct.Struct("!I")
_BUFFER = 1 << 16


def pack(name: object, value: object) -> list[Any]:
    """Return the parts of a message as bytes: the pickles of a name and of its value, and the value's buffers."""
    buffers: list[pickle.PickleBuffer] = []
    payload = dumps(value, protocol=5, buffer_callback=buffers.append)  # type: ignore[no-untyped-call]
    parts: list[Any] = [pickle.dumps(name, 5), payload, *(buffer.raw() for buffer in buffers)]
    head = struct.pack(f"!I{len(parts)}Q", len(parts), *map(len, parts))
    if sum(map(len, parts)) <= _JOIN_BYTES:
        return [b"".join((head, *parts))]
    return [head, *parts]


def name_of(parts: list[memoryview]) -> Any:
    return pickle.loads(parts[0])


def value_of(parts: list[memoryview]) -> Any:
    return pickle.loads(parts[1], buffers=parts[2:])


def read_message(stream: BufferedReader) -> list[memoryview]:
    """Return the parts of the next message of a stream; EOFError at its end."""
    (count,) = _COUNT.unpack(_exactly(stream, _COUNT.size))
    sizes = struct.unpack(f"!{count}Q", _exactly(stream, 8 * count))
    return [_exactly(stream, size) for size in sizes]


def _exactly(stream: BufferedReader, count: int) -> memoryview:
    # A bytearray would be filled with zeros first.
    view, at = np.empty(count, np.uint8).data, 0
    while at < count:
        read = stream.readinto(view[at:])  # type: ignore[attr-defined]
        if not read:
            raise EOFError("the connection is closed")
        at += read
    return view


class Sender:
    """A connection to another worker."""

    def __init__(self, address: tuple[str, int], token: bytes, context: ssl.SSLContext | None) -> None:
        self._socket = socket.create_connection(address, CONNECTS)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GIVES_UP_MS)
            if context is not None:
                self._socket = context.wrap_socket(self._socket, server_hostname=address[0])
            self._socket.settimeout(None)
            self._socket.sendall(token)
        except BaseException:
            self._socket.close()
            raise
        self._lock = threading.Lock()

    def send(self, parts: list[Any]) -> None:
        with self._lock:
            for part in parts:
                self._socket.sendall(part)

    def is_closed(self) -> bool:
        """Return whether the other end has closed the connection (this end never receives on it)."""
        if isinstance(self._socket, ssl.SSLSocket) or not hasattr(socket, "MSG_DONTWAIT"):
            return False
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._socket.close()


class Listener:
    """Accepts connections of other workers and calls `receive` with the parts of each message.

    The thread of a connection calls `lost` if the connection ends in the middle of a message, or a message cannot be
    stored.
    """

    def __init__(
        self,
        host: str,
        token: bytes,
        context: ssl.SSLContext | None,
        receive: Callable[[list[memoryview]], None],
        lost: Callable[[], None],
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self._token, self._context, self._receive, self._lost = token, context, receive, lost
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        threading.Thread(target=self._accept, name="ferro-flow-accept", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        self._is_closed = True
        for one in (self._socket, *self._connections):
            # A thread that waits in `accept` or `recv` returns.
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                logger.debug("a connection of flows was closed already: %s", error)
            one.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if not self._is_closed:
                    logger.warning("dask_ferro: a connection of a flow could not be accepted: %s", error)
                    sleep(_RETRY_S)
                continue
            threading.Thread(
                target=self._serve, args=(connection,), name="ferro-flow-receive", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        self._connections.add(connection)
        try:
            stream = self._greeted(connection)
            if stream is not None:
                self._read(stream)
        except (EOFError, OSError) as error:
            logger.debug("a connection of flows could not be established: %s", error)
        finally:
            self._connections.discard(connection)
            connection.close()

    def _greeted(self, connection: socket.socket) -> BufferedReader | None:
        """Return the stream of a connection; None: the connection is from another cluster."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(CONNECTS)
        if self._context is not None:
            connection = self._context.wrap_socket(connection, server_side=True)
            self._connections.add(connection)
        stream = cast("BufferedReader", connection.makefile("rb", _BUFFER))
        if not hmac.compare_digest(bytes(_exactly(stream, len(self._token))), self._token):
            logger.warning("dask_ferro: a connection without the token of this cluster was closed")
            return None
        connection.settimeout(None)
        return stream

    def _read(self, stream: BufferedReader) -> None:
        """Pass the messages of a connection to `receive` until it ends."""
        try:
            while stream.peek(1):
                self._receive(read_message(stream))
        # Members would wait for a value that was not stored.
        except Exception as error:  # noqa: BLE001
            if not self._is_closed:
                logger.warning("dask_ferro: a message of a flow was lost: %r", error)
                self._lost()
