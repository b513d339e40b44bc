"""One image through a network with parallel branches: the tasks and seconds of each granularity.

    python examples/branching_graph.py [--image 64] [--modules 3]

A batch can be cut into chunks of rows; a single image cannot, so the graph itself is cut.  "model" is one task, "op"
one task per node, and "auto" runs branches as separate tasks if each is worth more than the overhead of a task.  All
give the same numbers.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from dask.distributed import Client
from make_models import branching

import dask_ferro as ff

GRANULARITIES = ("model", "auto", "op")


def timed(client: Client, model: ff.Model, image: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the scores and the median seconds of three runs, after three runs that built the sessions.

    Each run has a different image, the given one the last, since Dask would not compute the same task twice.
    """
    seconds = []
    for shade in (5, 4, 3, 2, 1, 0):
        start = time.perf_counter()
        scores = client.compute(model(image + np.float32(shade))).result()
        seconds.append(time.perf_counter() - start)
    return scores, float(np.median(seconds[3:]))


def main() -> None:
    parser = argparse.ArgumentParser(description="A branching graph at three granularities.")
    parser.add_argument(
        "--image", type=int, default=64, help="width and height in pixels (default: %(default)s)"
    )
    parser.add_argument(
        "--modules", type=int, default=3, help="modules of four branches (default: %(default)s)"
    )
    options = parser.parse_args()
    proto = branching(modules=options.modules, image=options.image)
    image = np.random.default_rng(0).standard_normal((1, 3, options.image, options.image), dtype=np.float32)

    with ff.LocalCluster(n_workers=2, threads_per_worker=1) as cluster, Client(cluster) as client:
        results = []
        for granularity in GRANULARITIES:
            model = ff.from_onnx(proto, granularity=granularity)
            result, seconds = timed(client, model, image)
            results.append(result)
            nodes, tasks = sum(model.ops.values()), len(model.planned(image).bundles)
            print(f"{granularity:>5}: {nodes} nodes in {tasks:2} tasks, {1e3 * seconds:5.1f} ms")
    for granularity, result in zip(GRANULARITIES, results, strict=True):
        np.testing.assert_allclose(result, results[0], rtol=1e-3, atol=1e-4, err_msg=granularity)
    print(f"all three agree: class {results[0].argmax()}, score {results[0].max():.3f}")


if __name__ == "__main__":
    main()
