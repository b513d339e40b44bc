"""Attention, rotary embeddings and recurrent cells."""

from __future__ import annotations

from collections.abc import Mapping

from dask_ferro.graph.ir.nodes import Operands
from dask_ferro.graph.ops.facts import EXP, SOFTMAX, Flops, OpFacts
from dask_ferro.graph.ops.labels import Dims, Rule, TypedNode, align

# FLOPs.


def _attention_flops(o: Operands) -> float:
    """Two products of [q length, kv length] by the head size, and a softmax of as many scores."""
    q, k, v = o.shape(0), o.shape(1), o.shape(2)
    if len(q) == 4:
        batch, heads, length, size = q
        v_size = v[-1] if v else size
    else:
        batch, length, hidden = (*q, 1, 1, 1)[:3]
        heads = o.attribute("q_num_heads", 1)
        size = hidden // max(1, heads)
        v_size = (v[-1] if v else hidden) // max(1, o.attribute("kv_num_heads", heads))
    past = o.shape(4)
    kv_length = (k[-2] if len(k) > 1 else 1) + (past[-2] if len(past) > 1 else 0)
    soft_cap = (EXP + 2) * bool(o.attribute("softcap", 0.0))
    each = 2.0 * size + 2.0 * v_size + 1 + SOFTMAX + o.has(3) + soft_cap  # 1: the scale
    return float(batch * heads * length * kv_length * each)


def _cell_flops(gates: int, activations: float, products: float) -> Flops:
    """For each step and gate: input and state times weights, and biases; then activations and products."""

    def count(o: Operands) -> float:
        x, w, r = o.shape(0), o.shape(1), o.shape(2)
        if len(x) < 3 or len(w) < 3 or len(r) < 3:
            return float(o.out())
        directions, hidden = r[0], r[2]
        gate = 2.0 * w[2] + 2.0 * hidden + 2.0 * o.has(3)
        return x[0] * x[1] * directions * hidden * (gates * gate + activations * EXP + products)

    return count


# Labels.


def _attention(o: TypedNode) -> Rule:
    """Batch and heads; heads are a dimension of their own, or parts of the last dimension."""
    flat = o.rank() == 3
    q: Dims = ("b", None, "h") if flat else ("b", "h", None, None)
    heads = o.attribute("q_num_heads", 1) if flat else o.shape(0)[1]
    state: Dims = ("b", "h", None, None)
    inputs = (q, q, q, _mask(o.shape(3), (o.shape(0)[0], heads)), state, state, ("b",))
    counts = {"q_num_heads": (0, 2), "kv_num_heads": (1, 2)} if flat else {}
    return Rule(inputs, (q, state, state, state)[: len(o.node.outputs)], counts=counts)


def _mask(shape: tuple[int, ...], stacked: tuple[int, int]) -> Dims:
    """The labels of a mask that broadcasts to batch, heads, queries and keys."""
    labels = {"0": "b", "1": "h", None: None}
    return (*(labels[x] for x in align(shape[:-2], stacked)), *(None,) * min(2, len(shape)))


def _rotary(o: TypedNode) -> Rule:
    """Batch, positions and, if they have a dimension of their own, heads."""
    x: Dims = ("b", "s", None) if o.rank() == 3 else ("b", "h", "s", None)
    cache: Dims = ("b", "s", None) if o.rank(1) == 3 else (None,) * o.rank(1)
    return Rule((x, cache, cache, ("b", "s")), (x,))


def _recurrent(o: TypedNode) -> Rule:
    """Batch."""
    is_first = o.attribute("layout", 0)
    x: Dims = ("b", None, None) if is_first else (None, "b", None)
    y: Dims = ("b", None, None, None) if is_first else (None, None, "b", None)
    return Rule((x, (), (), (), ("b",), x, x), (y, x, x)[: len(o.node.outputs)])


TABLE: Mapping[str, OpFacts] = {
    "Attention": OpFacts(_attention_flops, labels=_attention),
    "FlexAttention": OpFacts(_attention_flops),
    # A state of 64 rows for each head, which a token updates and reads.
    "LinearAttention": OpFacts(4 * 64),
    "RotaryEmbedding": OpFacts(3, labels=_rotary),
    "RNN": OpFacts(_cell_flops(1, 1, 0), labels=_recurrent),
    "GRU": OpFacts(_cell_flops(3, 3, 5), labels=_recurrent),
    "LSTM": OpFacts(_cell_flops(4, 5, 4), labels=_recurrent),
}
