"""A pipeline whose actions sleep: it shows a schedule on real workers, independent of the number of cores.

The forward and the backward of each chunk copy their input and sleep for the given seconds.  So the gradient of each
chunk equals its micro-batch, and the results of a run can be checked.  Durations are seconds.
"""

from __future__ import annotations

import numpy as np

from dask_ferro.graph.ir import regions
from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.ir.regions import BACKWARD, Region
from dask_ferro.graph.pipeline.stages import LOSS, StageModel, record_chunks
from dask_ferro.graph.tensor.emit import build
from dask_ferro.graph.tensor.namespace import mean
from dask_ferro.graph.tensor.tensor import Node, Tensor, input


def sleeping(chunks: int, seconds: float) -> StageModel:
    """Return a staged model with an input `x` of (rows, 1), float32.

    Parameters
    ----------
    chunks : int
    seconds : float
        Of each F, I and W of a chunk.  The first chunk has no input gradient, so its W takes the seconds of I too.
    """
    x = h = input("x", ("N", 1), np.float32)
    for chunk in range(chunks):
        h = _asleep(h, Region(str(chunk)), "forward", seconds)
    with regions.set_region(Region(str(chunks - 1))):
        outputs = {LOSS: mean(h)}
    for chunk in reversed(range(chunks)):
        region = Region(str(chunk), BACKWARD)
        later = seconds if chunk else 2 * seconds
        outputs[f"gradient_{chunk}"] = _asleep(h, region, "weight_grad", later)
        h = _asleep(h, region, "input_grad", seconds)
    model = build(outputs, [x], name="sleeping").model
    return StageModel(record_chunks(model, chunks), {}, (), tuple(f"gradient_{c}" for c in range(chunks)))


def _asleep(x: Tensor, region: Region, action: str, seconds: float) -> Tensor:
    """Return a copy of `x` by a sleeping node; it is named, as nodes with names are never merged."""
    name = f"{region.path}/{action}"
    node = Node("Sleep", (x,), (x.type,), {"seconds": seconds}, domain=OWN_DOMAIN, name=name, region=region)
    return Tensor(node, 0, x.type)
