"""One row of facts for an operator, `OpFacts`, and constructors for the facts that many rows share.

FLOPs are exact where arithmetic is the price: matrix products, convolutions, attention, recurrent cells (a multiply-
add is two).  For the rest they are a stated number for each element of the output or of the first input: plain
arithmetic and comparisons count 1, an exponential (or logarithm, sine, error function, power) `EXP`.  An operator
that only moves data counts none, and costs the time that its bytes take.  Algorithms are the direct ones: no
Winograd, no FFT convolution, causal masks save nothing.  Operators that few models use have a rough number.  The bodies
of an If, Loop or Scan are not counted here.

A row describes one node: its functions get the node's shapes and attributes, and the positions of a batch's rows in
its inputs.  The layers above decide the node's seconds, which labels are split, and the consequence of a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dask_ferro.graph.ir.nodes import Operands
from dask_ferro.graph.ops.labels import Labels, TypedNode
from dask_ferro.graph.ops.states import Counts, Depends, Finding, State, combine_dependence

# A vectorised exponential: range reduction, a polynomial of degree 5 or 6, scaling by a power of two.
EXP = 10.0
# Softmax: the maximum, a subtraction, the exponential, the sum, a division.
SOFTMAX = EXP + 4
# Bilinear interpolation of one sample: three lerps and the weights.
BILINEAR = 8.0

Flops: TypeAlias = Callable[[Operands], float]
# From the states of the inputs and the number of rows to the state of the outputs (a finding without the node's
# name); None: the labels decide.
RowStates: TypeAlias = Callable[[TypedNode, Sequence[State], int], "State | None"]
# From the elements of the inputs that contain the number of rows, and that number.
SizeStates: TypeAlias = Callable[[TypedNode, Sequence[Depends], int], State]


@dataclass(frozen=True)
class OpFacts:
    """The facts of one operator; the defaults hold for an operator without a row."""

    # FLOPs for each element of the outputs (0: the node moves data, or its bodies are counted), or a function of the
    # node.
    flops: Flops | float = 1.0
    # The bytes that are read: all, none (another name or shape of the same data), of the first input only its type,
    # or of the first input as many as are picked from it.
    touches: Literal["all", "none", "type", "picked"] = "all"
    # Dimensions that ranks can split, and along which the rows of a batch stay apart; None: each rank computes all.
    labels: Labels | None = None
    # The positions of the rows after the node, if labels cannot express them.
    row_states: RowStates | None = None
    # How a node combines rows, whatever the shapes; empty: it need not combine them.
    combines: str = ""
    # The meaning of an operand made of sizes next to the rows: any number, which combines rows, or lengths, so that
    # the shape of the result decides, or perhaps one of these.
    takes_sizes: Literal["as numbers", "in shapes", "perhaps"] = "as numbers"
    # The state of a result that is computed only from sizes.
    sizes: SizeStates | None = None
    # When it draws random numbers.
    draws: Literal["never", "always", "in training"] = "never"


def rows_of(names: str, facts: OpFacts) -> dict[str, OpFacts]:
    return dict.fromkeys(names.split(), facts)


def per_input(price: float) -> Flops:
    """Return FLOPs for the elements of the first input instead of the outputs."""
    return lambda o: price * o.size(0)


# Reasons why a node combines rows.

ALONG_ROWS = "works along the axis of the rows"
BY_NUMBER = "picks some by their number"
UNKNOWN_TO_KEEP = Finding(False, "is not known to keep them apart")


# Sizes.


def keeps_sizes(o: TypedNode, elements: Sequence[Depends], rows: int) -> State:
    return Counts(elements[0])


def sizes_by_element(o: TypedNode, elements: Sequence[Depends], rows: int) -> State:
    return Counts(combine_dependence(elements))
