"""A sharded graph as a Dask collection: each rank's segments on its worker, collectives between them.

    Ranks(spmd)({"x": x, "w": w}) --> {"y": ShardedArray}       lazy; parts stay where they are made

With a client, what is submitted together is one flow: its members are threads of the ranks' workers, and send each
other what they read.  When a worker dies, the flow runs again, with the same results, since the order of every sum is
fixed (`exchange`).  A `ShardedArray` may be an input of the next call without moving: the parameters of a training step
stay on their workers, and their lineage is cut now and then (`checkpoint`).  Weights are mapped from the model's
file.  `spmd_inputs` brings inputs to the workers.

A plan's stages, workers and devices are followed: a stage's nodes run on its workers, and a task requires its device
class (where the scheduler plugin is installed).  Calls that follow each other may be submitted together, so
micro-batches that are calls go through the stages one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from dask.base import tokenize
from dask.highlevelgraph import MaterializedLayer
from distributed import Client

from dask_ferro import config
from dask_ferro.engines.selection import check, support
from dask_ferro.flow.costs import FERRO
from dask_ferro.graph.cost.roofline import model_cost
from dask_ferro.graph.ir.inference import infer
from dask_ferro.graph.model.load import Loaded, load_own
from dask_ferro.graph.model.self_contained import CHECKED
from dask_ferro.graph.parallel.apply import Applied
from dask_ferro.graph.sharding.parts import Spmd, holders_of
from dask_ferro.graph.sharding.segments import Cut, is_collective
from dask_ferro.lower.client import live_client
from dask_ferro.lower.prepared.store import spool
from dask_ferro.lower.ranks import checkpoint
from dask_ferro.lower.ranks.collection import Arrays
from dask_ferro.lower.ranks.rank_assignment import Homes, RankWorkers, rank_layer
from dask_ferro.lower.ranks.sharded import ShardedArray, Written, call_outputs
from dask_ferro.lower.ranks.spmd_inputs import (
    Below,
    are_few,
    checked,
    content_of,
    feed,
    keys_read,
    stacked,
    tokens,
    travel_of,
)
from dask_ferro.lower.ranks.spmd_tasks import RankCall, source
from dask_ferro.lower.upstream import TaskRef
from dask_ferro.lower.worker.models import ModelRef, limits, remember


class _SpmdFile(NamedTuple):
    """The part of an opened model that `copy_for` needs."""

    loaded: Loaded
    ref: ModelRef


class Ranks:
    """A sharded graph that can be called, once or step by step.

    Parameters
    ----------
    spmd : Spmd
        From `graph.sharding.spmd.lower`.
    workers : sequence of str or int, optional
        Address of each rank's worker, or its number in the order of workers' names; ranks share where there are
        fewer.  By default all workers of the current client, in that order.  A plan's numbers of workers take
        precedence.
    exact : bool, optional
        Whether bits must not depend on where the graph is cut; a float32 graph is then a little slower.
    packed : collection of str, optional
        Outputs that go into tuples of several (`call_outputs.member_tuples`), and so need no task of their own, unless
        ranks share a part.

    Raises
    ------
    UnsupportedOp
        Nodes that no engine computes; the message names all of them.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ranks = ff.Ranks.of(ff.apply(y, "plan.yaml"))  # doctest: +SKIP
    >>> out = ranks({"x": batch})                      # doctest: +SKIP
    >>> ff.gather(out)                                 # doctest: +SKIP
    """

    def __init__(
        self,
        spmd: Spmd,
        *,
        workers: Sequence[str | int] | None = None,
        exact: bool = False,
        packed: Collection[str] = (),
    ) -> None:
        # What it was made of has been checked.
        spmd.model.meta[CHECKED] = True
        loaded = load_own(spmd.model, limits())
        path = spool(loaded.content or b"")
        rows = support(loaded.model)
        nodes = zip(rows, loaded.model.graph, strict=True)
        check("cannot run the sharded graph", [row for row, node in nodes if not is_collective(node)])
        self.spmd = spmd
        own = [port for port in spmd.outputs if port.name in packed and len({*port.parts}) == spmd.mesh.ranks]
        self.packed = frozenset(chain.from_iterable(port.parts for port in own))
        self._opened = _SpmdFile(loaded, remember(loaded, path))
        each = model_cost(loaded.model, infer(loaded.model)).seconds
        self.source = source(loaded.model, self._opened.ref, rows, each, exact=exact)
        sites = {s.site for s in self.pieces.segments} | {b.site for b in self.pieces.buckets}
        # Shared by calls: steps of a training follow each other in less time than a worker takes to join.
        self.workers = RankWorkers(workers, spmd.mesh.ranks, sites)

    @classmethod
    def of(
        cls,
        applied: Applied,
        *,
        follow: Mapping[str, str] | None = None,
        dims: Mapping[str, int] | None = None,
    ) -> Ranks:
        """Return a graph with its plan (`apply`): each stage on the workers that the plan numbers.

        A stage without numbers has as many workers as there are ranks, after those of the stage before it.
        Parameters and errors are those of `Applied.spmd`.
        """
        return cls(applied.spmd(follow=follow, dims=dims), workers=applied.workers)

    @property
    def pieces(self) -> Cut:
        """The graph's segments and buckets."""
        return self.source.pieces

    def __call__(self, arrays: Arrays) -> dict[str, ShardedArray]:
        """Return the outputs by name, lazily.

        Parameters
        ----------
        arrays : mapping of str to array, dask array or ShardedArray
            All inputs, by name in the model that was sharded.  They are kept until the result's lineage is cut, to be
            sent again after a worker's death: give each call arrays of its own.

        Raises
        ------
        ConfigError
            An input that is missing or unknown, or has another dtype, shape or layout than the graph's.

        Notes
        -----
        Where persisted inputs depend on ``ferro.ranks.checkpoint-calls`` successive calls or more, it waits
        for them and cuts their lineage.
        """
        checked(self.spmd, arrays)
        arrays = shortened(arrays, live_client())
        return call_outputs(self.spmd, arrays, self.written, self.workers)

    def written(self, arrays: Arrays, there: Homes, first: int = 0) -> Written:
        """Return a call on arrays as tasks.

        Parameters
        ----------
        arrays : mapping of str to array, dask array or ShardedArray
            All inputs, which passed `checked`.
        there : Homes
            The workers of the ranks.
        first : int, optional
            The order of the first tasks.
        """
        client = live_client()
        told = tokens(arrays)
        # As text: Dask's tokens of long nested sequences take longer than the rest of a call.
        token = tokenize(self.digest, self.source.exact, repr(sorted(told.items())), self.spmd.mesh.sizes)
        # One segment reads each input once, so no input needs a task of its own.
        is_one = self.spmd.mesh.ranks == len(self.pieces.segments) == 1
        travel = travel_of(arrays, client, inline=is_one or are_few(arrays))
        extra, below = self.content(client)
        call = RankCall(self.source, tokenize(token, travel.token, repr(keys_read(arrays))), extra, first)
        below += feed(call, self.spmd, arrays, told, there, client, travel)
        call.write()
        ends = call.ends(holders_of(self.spmd.outputs), self.packed)
        places = {port.name: [ends[name] for name in port.parts] for port in self.spmd.outputs}
        keys = {name: tuple(place.key for place in of) for name, of in places.items()}
        items = {name: tuple(place.index for place in of) for name, of in places.items()}
        graph = stacked(f"spmd-{call.token}", self.layer(call, there), below)
        return Written(token, graph, keys, items=items)

    def layer(self, call: RankCall, there: Homes) -> MaterializedLayer:
        """Return the tasks of a call as a layer, with what they require of a worker."""
        wants = {key: {"require": site.device} if site.device else {} for key, (_, site) in call.home.items()}
        others = {FERRO: wants.__getitem__} if any(wants.values()) else {}
        return rank_layer(call.tasks, call.order, call.home, there, call.about, **others)

    @property
    def digest(self) -> str:
        """The hash of the graph's content."""
        return self._opened.ref.digest

    def content(self, client: Client | None) -> tuple[dict[str, TaskRef], list[Below]]:
        """Return the model's content for workers that cannot see its file, as `content_of` does."""
        return content_of(self._opened, client)  # type: ignore[arg-type]  # it asks for these two alone


def shortened(arrays: Arrays, client: Client | None) -> Arrays:
    """Return the inputs of a call, with the lineage cut of those that depend on too many calls."""
    most = config.value("ranks.checkpoint-calls")
    if client is None or most is None:
        return arrays
    sharded = {name: value for name, value in arrays.items() if isinstance(value, ShardedArray)}
    long = {
        name: value for name, value in sharded.items() if value.made.calls >= most and value.tasks.is_fixed
    }
    return {**arrays, **(checkpoint.cut(long, client) if long else {})}
