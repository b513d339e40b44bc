"""The trace of a small run: two workers, a chain over both, one steal, and the ops of another task."""

from __future__ import annotations

from dask_ferro.trace import Span, Trace, TracedTask

W0, W1 = "tcp://10.0.0.1:1", "tcp://10.0.0.2:2"

RUN = Trace(
    spans=(
        Span("compute", "load-0", "load", W0, 0, 1.0, 2.0, 100),
        Span("op", "load-0", "MatMul", W0, 0, 1.0, 1.25, 40, "array/mm"),
        Span("op", "load-0", "Relu", W0, 0, 1.25, 2.0, 60, "array/relu"),
        Span("compute", "load-1", "load", W0, 1, 1.0, 1.5, 100),
        Span("steal", ("sum", 0), "sum", W1, 0, 1.5, 2.5, 0, W0),
        Span("transfer", ("sum", 0), "sum", W1, 0, 2.0, 2.25, 100, W0),
        Span("transfer", ("sum", 0), "sum", W1, 0, 2.1, 2.5, 100, W0),
        Span("compute", ("sum", 0), "sum", W1, 0, 2.5, 5.0, 8),
    ),
    tasks=(
        TracedTask("load-0", "load", "load", 1.0, 100, (), 0),
        TracedTask("load-1", "load", "load", 0.5, 100, (), 1),
        TracedTask(("sum", 0), "sum", "sum", 2.5, 8, ("load-0", "load-1"), 2),
    ),
    workers={W0: 2, W1: 1},
    counts={"requests": 2, "confirmed": 1, "refused": 1, "elapsed": 5.5},
)
