"""Ctrl-C while processes are being started."""

import gc
import os
import signal
import sys
import threading
import time

import pytest

from dask_ferro.local.sigint import defer_sigint, repeat_sigint
from tests.waiting import ended


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)


def test_an_interrupt_is_raised_when_the_block_is_done():
    done = []

    def block():
        with defer_sigint():
            interrupt()
            done.append("block")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["block"]


def test_without_an_interrupt_nothing_is_raised_and_the_handler_is_back():
    before = signal.getsignal(signal.SIGINT)
    with defer_sigint():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_of_the_block_comes_first():
    def block():
        with defer_sigint():
            interrupt()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()


def test_a_second_interrupt_is_raised_at_once():
    done = []

    def block():
        with defer_sigint():
            signal.getsignal(signal.SIGINT)(signal.SIGINT, None)
            done.append("first")
            signal.getsignal(signal.SIGINT)(signal.SIGINT, None)
            done.append("second")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["first"]


def test_in_another_thread_it_does_nothing():
    seen = []

    def look():
        with defer_sigint():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    ended(thread)
    assert seen == [signal.getsignal(signal.SIGINT)]


class Finalized:
    """Interrupted while it goes."""

    def __del__(self):
        interrupt()


def collected(phase, info):
    gc.callbacks.remove(collected)
    interrupt()


@pytest.mark.usefixtures("pythons_own_handler")
@pytest.mark.parametrize("dropped", ["a finalizer", "the garbage collector"])
def test_an_interrupt_that_python_drops_comes_again(dropped):
    def block():
        with repeat_sigint():
            if dropped == "a finalizer":
                Finalized()
            else:
                gc.callbacks.append(collected)
                gc.collect()
            time.sleep(10)

    before = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt):
        block()
    assert sys.unraisablehook is before


def test_other_errors_that_python_drops_are_told_as_ever(monkeypatch):
    class Fails:
        def __del__(self):
            raise ZeroDivisionError

    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: told.append(dropped.exc_type))
    with repeat_sigint():
        Fails()
    assert told == [ZeroDivisionError]
