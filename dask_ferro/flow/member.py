"""The Dask task that runs a share: a bundle, which is a flow of one member, or a member of a flow.

    one member, one output     its value
    else                       a tuple of values; an error of a task is a `TaskFailure`, which `pick` raises

A run without a future ends its members with `Reschedule`: the scheduler runs them again.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any, NamedTuple

from dask.typing import Key
from distributed import Reschedule, get_worker

from dask_ferro.flow.hub import Home, Void, call_task, hub_of
from dask_ferro.flow.repeat import unroll
from dask_ferro.flow.run import FlowRun, Share, TaskFailure
from dask_ferro.flow.times import TaskTimes

# The annotation with which the scheduler announces a run: its name, and the places of its members.
PLACES = "ferro-flow"
# The metadata of a member that has ended: its `MemberFigures`.
FIGURES = "ferro-flow"


class ShareInput(NamedTuple):
    """Source of a share's input: the argument's number, the position in it (-1: all of it), and the input's key."""

    argument: int
    place: int
    key: Key


def run_share(share: Share, reads: tuple[ShareInput, ...], *arguments: Any) -> Any:
    """Return the results of a share's tasks; if there is only one, raise the error of its task."""
    inputs = {
        read.key: arguments[read.argument] if read.place < 0 else arguments[read.argument][read.place]
        for read in reads
    }
    share, times = unroll(share), TaskTimes()
    try:
        results = _run(share, inputs, times) if share.members == 1 else _join(share, inputs, times)
    finally:
        times.tell()
    if share.members == 1 and len(results) == 1:
        return pick(results, 0)
    return results


def _run(share: Share, inputs: dict[Key, Any], times: TaskTimes) -> tuple[Any, ...]:
    run = FlowRun([share.member])
    run.add(share, inputs)
    while run.is_ready:
        task = run.take()
        run.finish(task, call_task(task, run.inputs_of(task), times))
    return run.results(share)


def _join(share: Share, inputs: dict[Key, Any], times: TaskTimes) -> tuple[Any, ...]:
    worker = get_worker()
    own = worker.state.tasks[worker.get_current_task()]
    assert own.annotations is not None
    # Tuples may have become lists on the way.
    run, homes = own.annotations[PLACES]
    hub = hub_of(worker.address)
    try:
        # The plugin of flows is being removed from this worker: the scheduler decides about the member.
        if hub is None:
            raise Void(run)
        results = hub.run(run, share, inputs, [Home(*home) for home in homes], times)
    except Void:
        raise Reschedule from None
    own.metadata[FIGURES] = astuple(times.figures)
    return results


def pick(results: tuple[Any, ...], place: int, *silent: Any) -> Any:
    """Return one result of a share that has several, or raise its error; `silent` are members without results."""
    result = results[place]
    if isinstance(result, TaskFailure):
        raise result.error
    return result


def pass_on(results: tuple[Any, ...], place: int, *silent: Any) -> Any:
    """Return one result of a share for another share, to which the error of a task passes as a value."""
    return results[place]


def is_ours(spec: object) -> bool:
    """Return whether a task of a graph is a bundle or a flow's member, or picks a result of one."""
    return getattr(spec, "func", None) in (run_share, pick, pass_on)


def is_pick(spec: object) -> bool:
    """Return whether a task picks a result of a bundle or of a flow's member."""
    return getattr(spec, "func", None) in (pick, pass_on)


def share_of(spec: Any) -> Share | None:
    """Return the share of a task of a graph that is a bundle or a flow's member; else None."""
    if getattr(spec, "func", None) is not run_share:
        return None
    share = spec.args[0]
    return share if isinstance(share, Share) else None
