"""Connections of flows: values of all sizes arrive as they were sent, over TLS too, and nothing without the token."""

from __future__ import annotations

import pickle
import queue
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from distributed.security import Security

from dask_ferro.flow.channel import Listener, Sender, name_of, pack, value_of
from tests.waiting import BOUND_S, until

TOKEN = bytes(range(32))


@pytest.fixture(params=[False, True], ids=["plain", "TLS"])
def contexts(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    if not request.param:
        return None, None
    security = Security.temporary()
    made = security.get_listen_args("worker"), security.get_connection_args("worker")
    return made[0]["ssl_context"], made[1]["ssl_context"]


@pytest.fixture
def arrived() -> queue.Queue[list[memoryview]]:
    return queue.Queue()


@pytest.fixture
def lost() -> list[bool]:
    """A true value for each time that values may have been lost."""
    return []


@pytest.fixture
def listener(contexts: Any, arrived: queue.Queue[list[memoryview]], lost: list[bool]) -> Iterator[Listener]:
    listener = Listener("127.0.0.1", TOKEN, contexts[0], arrived.put, lambda: lost.append(True))
    yield listener
    listener.close()


def test_values_arrive_in_their_order(
    listener: Listener, contexts: Any, arrived: queue.Queue[list[memoryview]], lost: list[bool]
) -> None:
    sender = Sender(("127.0.0.1", listener.port), TOKEN, contexts[1])
    rng = np.random.default_rng(0)
    values = [
        None,
        "text",
        rng.random(3),
        rng.random((300, 1000)),
        rng.random((400, 500)).T,
        np.zeros((0, 4)),
    ]
    for i, value in enumerate(values):
        sender.send(pack(("run", i), value))
    for i, value in enumerate(values):
        parts = arrived.get(timeout=BOUND_S)
        assert name_of(parts) == ("run", i)
        got = value_of(parts)
        assert type(got) is type(value)
        np.testing.assert_array_equal(got, value)
        # What arrived belongs to the receiver, as a value that it computed.
        if isinstance(got, np.ndarray):
            assert got.flags.writeable
    sender.close()
    assert not lost


def test_a_message_that_breaks_off_may_have_been_a_value(
    listener: Listener, contexts: Any, arrived: queue.Queue[list[memoryview]], lost: list[bool]
) -> None:
    sender = Sender(("127.0.0.1", listener.port), TOKEN, contexts[1])
    sender.send([pack("run", bytes(1000))[0][:500]])
    sender.close()
    until(lambda: lost, "the loss to be told")
    assert arrived.empty()


@pytest.mark.parametrize("start", [b"", bytes(32), TOKEN[:31] + b"x"], ids=["nothing", "zeros", "nearly"])
def test_without_the_token_nothing_is_read(start: bytes) -> None:
    arrived: queue.Queue[list[memoryview]] = queue.Queue()
    lost: list[bool] = []
    listener = Listener("127.0.0.1", TOKEN, None, arrived.put, lambda: lost.append(True))
    try:
        with socket.create_connection(("127.0.0.1", listener.port), BOUND_S) as connection:
            connection.sendall(start + b"".join(pack("run", 1)))
            connection.shutdown(socket.SHUT_WR)
            # The listener closes the connection, with or without a reset.
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        assert arrived.empty()
        # A stranger ends no run.
        assert not lost
    finally:
        listener.close()


def test_a_message_that_is_no_pickle_is_an_error_of_its_value() -> None:
    parts = [bytearray(pickle.dumps(("run", "key"))), bytearray(b"no pickle")]
    assert name_of(parts) == ("run", "key")
    with pytest.raises(pickle.UnpicklingError):
        value_of(parts)
