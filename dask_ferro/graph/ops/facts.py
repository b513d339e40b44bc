"""One row of facts for an operator, `OpFacts`, and constructors for the facts that many rows share.

FLOPs are exact where arithmetic is the price: matrix products, convolutions, attention, recurrent cells (a multiply-
add is two).  For the rest they are a stated number for each element of the output or of the first input: plain
arithmetic and comparisons count 1, an exponential (or logarithm, sine, error function, power) `EXP`.  An operator
that only moves data counts none, and costs the time that its bytes take.  Algorithms are the direct ones: no
Winograd, no FFT convolution, causal masks save nothing.  The bodies of an If, Loop or Scan are not counted here.

A row speaks of one node: it is given the node's shapes and attributes, and of the rows of a batch where they lie in
its inputs.  What the node costs in seconds, which labels are split, and what becomes of a finding is decided above.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dask_ferro.graph.ir.nodes import Operands
from dask_ferro.graph.ops.labels import Labels, TypedNode
from dask_ferro.graph.ops.states import Counts, Depends, Finding, State, either

# A vectorised exponential: range reduction, a polynomial of degree 5 or 6, scaling by a power of two.
EXP = 10.0
# Softmax: the maximum, a subtraction, the exponential, the sum, a division.
SOFTMAX = EXP + 4
# Bilinear interpolation of one sample: three lerps and the weights.
BILINEAR = 8.0

Flops: TypeAlias = Callable[[Operands], float]
# Given the states of the inputs and the number of rows: the state of the outputs (a finding without the node's name);
# None: as its labels say.
RowStates: TypeAlias = Callable[[TypedNode, Sequence[State], int], "State | None"]
# Given the elements of the inputs that the number of rows is in, and that number.
SizeStates: TypeAlias = Callable[[TypedNode, Sequence[Depends], int], State]


@dataclass(frozen=True)
class OpFacts:
    """The facts of one operator; the defaults hold for an operator without a row.

    Attributes
    ----------
    flops : float or callable
        FLOPs for each element of the outputs (0: the node moves data, or its bodies are counted node by node); or those
        of a node on its operands.
    touches : str
        Of inputs and outputs, all bytes; none of them (another name or shape of the same data); the first input for
        its type alone; or the first input where it is picked from.
    labels : callable, optional
        Which dimensions can be split over ranks, and along which the rows of a batch stay apart: along all others they
        are combined.  None: each rank computes the node whole.
    row_states : callable, optional
        Where the rows lie after the node, if labels cannot say it.
    combines : str
        How a node combines rows, whatever the shapes; empty: it may not.
    takes_sizes : str
        How a node takes an operand that is made of sizes beside the rows: as any number, which combines them; as
        lengths, so that the shape of the result tells; or perhaps as one of them.
    sizes : callable, optional
        The state of a result that is made of sizes alone.
    draws : str
        Whether it draws random numbers: never, always, or if it is told to train.
    """

    flops: Flops | float = 1.0
    touches: Literal["all", "none", "type", "picked"] = "all"
    labels: Labels | None = None
    row_states: RowStates | None = None
    combines: str = ""
    takes_sizes: Literal["as numbers", "in shapes", "perhaps"] = "as numbers"
    sizes: SizeStates | None = None
    draws: Literal["never", "always", "in training"] = "never"


def rows_of(names: str, facts: OpFacts) -> dict[str, OpFacts]:
    """Return the same facts for each operator of a list."""
    return dict.fromkeys(names.split(), facts)


# FLOPs.


def per_input(price: float) -> Flops:
    """Return the FLOPs of a node with this price for each element of its first input."""
    return lambda o: price * o.size(0)


# Reasons why a node combines rows.

ALONG_ROWS = "works along the axis of the rows"
BY_NUMBER = "picks some by their number"
UNKNOWN_TO_KEEP = Finding(False, "is not known to keep them apart")


# Sizes.


def keeps_sizes(o: TypedNode, elements: Sequence[Depends], rows: int) -> State:
    """Return the state of sizes whose elements stay in order."""
    return Counts(elements[0])


def sizes_by_element(o: TypedNode, elements: Sequence[Depends], rows: int) -> State:
    """Return the state of sizes that are computed with one by one."""
    return Counts(either(elements))
