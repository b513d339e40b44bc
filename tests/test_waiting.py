"""The waits of `tests/waiting.py` are bounded, and their messages have the condition and the last state."""

import asyncio
import subprocess
import sys
from threading import Event, Thread

import distributed
import pytest

from tests import waiting


def test_a_condition_that_comes_to_hold_is_returned():
    seen = iter([0, None, "", "here"])
    assert waiting.until(lambda: next(seen), "the fourth look", every=0) == "here"


def test_a_condition_is_looked_at_once_more_at_the_bound():
    assert waiting.until(lambda: "holds at once", "nothing", seconds=0) == "holds at once"


def test_a_condition_that_never_holds_is_told_with_its_last_state():
    with pytest.raises(AssertionError, match=r"waited 0 s for two workers; last seen: \[\]"):
        waiting.until(list, "two workers", seconds=0)
    with pytest.raises(AssertionError, match="for two workers; last seen: 'one of two'"):
        waiting.until(list, "two workers", seconds=0, seen=lambda: "one of two")


@pytest.mark.parametrize("kind", ["function", "coroutine function"])
def test_coroutines_wait_alike(kind):
    async def soon():
        await asyncio.sleep(0)
        return next(values)

    for given, bound in ((["", "here"], 60), ([""], 0)):
        values = iter(given)
        holds = soon if kind == "coroutine function" else lambda: next(values)  # noqa: B023 - called in this turn
        wait = waiting.until_async(holds, "a word", seconds=bound, every=0)
        if bound:
            assert asyncio.run(wait) == "here"
        else:
            with pytest.raises(AssertionError, match="waited 0 s for a word; last seen: ''"):
                asyncio.run(wait)


def test_threads_and_processes_that_do_not_end_are_named():
    go = Event()
    thread = Thread(target=go.wait, args=(60,), name="the-sleeper")
    thread.start()
    with pytest.raises(AssertionError, match=r"waited 0.01 s for the end of the-sleeper"):
        waiting.ended(thread, seconds=0.01)
    go.set()
    waiting.ended(thread)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        said = r"waited 0.01 s for the reader's end; last seen: it runs, pid \d+"
        with pytest.raises(AssertionError, match=said):
            waiting.ended(process, "the reader's end", seconds=0.01)
        process.communicate(b"\n", timeout=waiting.BOUND_S)
    assert waiting.ended(process) == 0


@pytest.mark.cluster
def test_tasks_that_do_not_end_are_named(client):
    held = client.submit(waiting.opened, "the-go", key="held", pure=False)
    said = r"for 1 tasks; last seen: 1 of 1 still pending, among them \['held'\]"
    with pytest.raises(AssertionError, match=said):
        waiting.finished([held], seconds=0.01)
    with pytest.raises(AssertionError, match=r"waited 0.01 s for the held one"):
        waiting.result(held, "the held one", seconds=0.01)
    distributed.Event("the-go", client=client).set()
    assert waiting.result(held) is None
    late = client.submit(waiting.opened, "never", seconds=0.01, key="late", pure=False)
    with pytest.raises(AssertionError, match="for the event 'never'; last seen: it is not set"):
        waiting.result(late)
