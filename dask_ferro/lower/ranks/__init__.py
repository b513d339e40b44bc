"""Run sharded graphs and pipelines as Dask collections: tasks of ranks, with collectives between them, as one flow.

The walk of a call, and the module of each step:

    ranks({"x": x, "w": w})    inputs are checked; the tasks have keys of the call's own                calls, spmd
      feed                     each part gets a place: a key, and a position if that has a tuple      spmd_inputs
      RankCall.write           tasks of each rank's segments, and of the collectives      spmd_tasks, exchange
      StepTasks                of a pipeline: the tasks of each micro-batch, in the schedule's order    scheduled
      annotations_of           the member that runs each task: a thread of the rank's worker          rank_assignment
    {"y": ShardedArray}        the tasks that make y, and the places of its parts; none has run       sharded
    client.persist(y)          Dask's scheduler makes one flow of the tasks of ranks                  lower.bundling
    ranks({"x": x2, "w": y})   reads the parts without moving them
    gather({"y": y})           parts are fetched, and joined                                          sharded

`parallel` creates a `pipeline`, whose calls are such calls, and a `run` has their results as one collection.  A
training submits several calls at a time: `calls` writes one of them as a template that the others repeat, and packs the
results of a member into one tuple.

Dask computes the results of a lost worker again: all inputs are in the graph, as arrays, or as tasks of earlier
calls. An input that depends on ``ferro.ranks.checkpoint-calls`` submissions is fetched by the client (`calls`) and
becomes an array of the next call, so that Dask forgets the earlier tasks.
"""
