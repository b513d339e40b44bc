"""Run a sharded graph as a Dask collection: each rank's segments on its worker, collectives between them.

    Ranks(spmd)({"x": x, "w": w}) --> {"y": ShardedArray}       lazy; parts stay on their workers

Tasks that a client submits together are one flow: its members are threads of the ranks' workers, which send each
other their inputs.  If a worker dies, the flow runs again with the same results, because the order of every sum is
fixed (`exchange`).  A `ShardedArray` may be an input of the next call without moving.  Weights are mapped from the
model's file.  A stage's nodes run on its workers, and a task requires its device class (if the scheduler plugin is
installed).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from dask.highlevelgraph import HighLevelGraph

from dask_ferro.engines.selection import check, support
from dask_ferro.graph.cost.roofline import model_cost
from dask_ferro.graph.ir.inference import infer
from dask_ferro.graph.model.embedding import CHECKED_KEY
from dask_ferro.graph.model.load import load_built
from dask_ferro.graph.parallel.apply import PlannedGraph
from dask_ferro.graph.sharding.parts import Spmd
from dask_ferro.graph.sharding.segments import GraphCut, is_collective
from dask_ferro.lower.client import live_client
from dask_ferro.lower.inputs.shipping import copy_for
from dask_ferro.lower.preparation.store import spool
from dask_ferro.lower.ranks.calls import RankFunction
from dask_ferro.lower.ranks.rank_assignment import RankWorkers
from dask_ferro.lower.ranks.sharded_array import Arrays
from dask_ferro.lower.ranks.spmd_inputs import check_inputs, feed
from dask_ferro.lower.ranks.spmd_tasks import Places, RankCall, RankSource, RankTasks
from dask_ferro.lower.upstream import TaskRef
from dask_ferro.lower.worker.models import limits, remember


class Ranks(RankFunction):
    """A sharded graph as a function, for one call or step by step.

    Parameters
    ----------
    spmd : Spmd
        Result of `graph.sharding.spmd.lower`.
    workers : sequence of str or int, optional
        Address of each rank's worker, or its number in the order of workers' names; ranks share workers if there are
        fewer.  By default all workers of the current client, in that order.  A plan's numbers of workers take
        precedence.
    exact : bool, optional
        Whether bits must not depend on the places at which the graph is cut; a float32 graph is then a little slower.
    is_packed : bool, optional
        Whether outputs become items of tuples (`calls.member_tuples`), and so need no task of their own, unless ranks
        share a part.

    Raises
    ------
    UnsupportedOpError
        If no engine computes some nodes; the message names all of them.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.parallel as fp
    >>> ranks = fp.Ranks.of(ff.apply_plan(y, "plan.yaml"))  # doctest: +SKIP
    >>> out = ranks({"x": batch})                      # doctest: +SKIP
    >>> fp.gather(out)                                 # doctest: +SKIP
    """

    def __init__(
        self,
        spmd: Spmd,
        *,
        workers: Sequence[str | int] | None = None,
        exact: bool = False,
        is_packed: bool = False,
    ) -> None:
        # Its source has been checked.
        spmd.model.meta[CHECKED_KEY] = True
        loaded = load_built(spmd.model, limits())
        path = spool(loaded.content or b"")
        rows = support(loaded.model)
        nodes = zip(rows, loaded.model.graph, strict=True)
        check("cannot run the sharded graph", [row for row, node in nodes if not is_collective(node)])
        self.spmd, self.mesh, self.outputs = spmd, spmd.mesh, spmd.outputs
        own = [port.parts for port in spmd.outputs if is_packed and len({*port.parts}) == spmd.mesh.ranks]
        self._packed = frozenset(chain.from_iterable(own))
        each = model_cost(loaded.model, infer(loaded.model)).seconds
        self._loaded = loaded
        self.source = RankSource(loaded.model, remember(loaded, path)[0], rows, each, exact)
        sites = {s.site for s in self.pieces.segments} | {b.site for b in self.pieces.buckets}
        # Shared by calls: steps of a training follow each other in less time than a worker takes to join.
        self.workers = RankWorkers(workers, spmd.mesh.ranks, sites)

    @classmethod
    def of(
        cls,
        applied: PlannedGraph,
        *,
        follow: Mapping[str, str] | None = None,
        dims: Mapping[str, int] | None = None,
    ) -> Ranks:
        """Return a graph with its plan (`apply`): each stage on the workers that the plan numbers.

        A stage without numbers has as many workers as there are ranks, after the workers of the previous stage.
        Parameters and errors are the same as in `PlannedGraph.spmd`.
        """
        return cls(applied.spmd(follow=follow, dims=dims), workers=applied.workers)

    @property
    def pieces(self) -> GraphCut:
        """The graph's segments and buckets."""
        return self.source.pieces

    def check(self, arrays: Arrays) -> None:
        """Raise `InputError` for inputs that are unknown, or have another dtype or layout."""
        check_inputs(self.spmd, arrays)

    def tasks(self, name: str, arrays: Arrays, later: Collection[str] = ()) -> tuple[RankTasks, Places]:
        """Return the tasks of a call, with a name in their keys, and the places of outputs."""
        call = self.call(name)
        feed(call, self.spmd, arrays, later)
        call.write()
        return call, call.ends(self.outputs, self._packed)

    def call(self, name: str) -> RankCall:
        """Return a call without its inputs and tasks."""
        call, client = RankCall(self.source, name), live_client()
        # The model's content, for workers that cannot see its file.
        copy = None if client is None else copy_for(self._loaded, self.source.ref.path, client)
        if copy is not None and copy.top is not None:
            call.below[copy.top] = HighLevelGraph(copy.layers, copy.dependencies)
            call.extra = {"copy": TaskRef(copy.source.at(0))}
        return call
