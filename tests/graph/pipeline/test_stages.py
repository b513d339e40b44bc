"""Cutting a model, forward and backward, into the chunks of a pipeline."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro.engines import array
from dask_ferro.engines.compile import nodes_between
from dask_ferro.errors import InputError
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.model.load import load
from dask_ferro.graph.pipeline.stages import balance, cut_stages
from dask_ferro.graph.sharding.node_placement import CHUNK
from dask_ferro.graph.tensor import nn, pytree
from dask_ferro.graph.tensor.emit import build
from dask_ferro.graph.tensor.tensor import asarray, input
from tests.each import every
from tests.graph.pipeline.chunks import pieces
from tests.graph.pipeline.nets import mlp, tied, transformer
from tests.graph.tensor.runs import values

NETS = {"mlp": mlp, "tied": tied, "transformer": transformer}


def cut(net, chunks, cuts=None, params=True):
    found = cut_stages({"loss": net.loss}, net.params if params else None, chunks=chunks, cuts=cuts)
    return found, load(ir.to_proto(found.model)).model


def run_part(model, part, known):
    nodes = nodes_between(model, part.inputs, part.outputs)
    weights = {name: v.const_value for name, v in model.graph.initializers.items()}
    program = array.Program(nodes, part.inputs, part.outputs, opset=model.opset_imports[""], weights=weights)
    found = program(*(known[name] for name in part.inputs))
    return dict(zip(part.outputs, found, strict=True))


def run_chunks(model, cuts, known):
    """Forwards in order, then the chunks' backwards from the last, and all weight gradients at the very end."""
    known = dict(known)
    for piece in cuts:
        known |= run_part(model, piece.forward, known)
    for kind in ("input_grad", "weight_grad"):
        for piece in reversed(cuts):
            part = getattr(piece, kind)
            known |= run_part(model, part, known) if part.outputs else {}
    return known


# ---- balance -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "crossing", "pieces_", "starts"),
    [
        pytest.param([1, 1, 1, 1], [5, 5, 5], 2, (0, 2), id="halves of equal items"),
        pytest.param([1, 1, 1, 3], [0, 0, 0], 2, (0, 3), id="the heavy item is alone"),
        pytest.param([1, 1, 1], [9, 1], 1, (0,), id="one piece is not cut"),
        pytest.param(
            [10, 0.1, 0.1, 10], [9, 9, 1], 2, (0, 3), id="of cuts as good, the one that little crosses"
        ),
        pytest.param([0, 0, 0], [1, 1], 3, (0, 1, 2), id="items without weight are dealt out"),
        pytest.param([0, 4, 0, 0], [1, 1, 1], 4, (0, 1, 2, 3), id="no piece is empty"),
    ],
)
def test_cuts(weights, crossing, pieces_, starts):
    assert balance(weights, crossing, pieces_) == starts


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_a_piece_is_heavier_than_its_share_by_one_item_at_most(weights, data):
    count = data.draw(st.integers(1, len(weights)))
    crossing = data.draw(st.lists(st.integers(0, 9), min_size=len(weights) - 1, max_size=len(weights) - 1))
    starts = balance(weights, crossing, count)
    assert starts[0] == 0
    assert list(starts) == sorted(set(starts))
    assert len(starts) == count
    heaviest = max(sum(weights[i:j]) for i, j in zip(starts, [*starts[1:], len(weights)], strict=True))
    # Both ends of a piece may be moved to save bytes.
    assert heaviest <= 1.1 * sum(weights) / count + max(weights) + 1e-9


# ---- the same numbers --------------------------------------------------------------------------------------


@every("name", NETS)
@every("chunks", [1, 2, 4])
def test_chunks_compute_the_bits_of_the_whole(name, chunks):
    net = NETS[name]()
    found, model = cut(net, chunks)
    feeds = net.batch(3)
    grads = pytree.leaves(grad(net.loss, net.params))
    whole = values({"loss": net.loss} | {f"gradient_{i}": g for i, g in enumerate(grads)}, feeds)
    parts = run_chunks(model, pieces(model, chunks), found.bound | feeds)
    for output, value in whole.items():
        np.testing.assert_array_equal(parts[output], value)


@pytest.mark.parametrize("name", NETS)
def test_the_staged_model_has_the_nodes_of_the_whole(name):
    net = NETS[name]()
    found, _ = cut(net, 2)
    outputs = [net.loss, *pytree.leaves(grad(net.loss, net.params))]
    whole = build(outputs, pytree.leaves(net.params)).model
    staged_, alone = (computed(m) for m in (found.model, whole))
    assert set(staged_.values()) == set(alone.values())
    # Equal nodes are one, but where they lie in two chunks.
    chunks = Counter((what, node.metadata_props[CHUNK]) for node, what in staged_.items())
    assert max(chunks.values()) <= max(Counter(alone.values()).values())
    assert len(staged_) - len(set(chunks)) == len(alone) - len(set(alone.values()))


def computed(model):
    """What each node computes, down to inputs and constants, whatever values are called."""
    known = {str(v.name): i for i, v in enumerate(model.graph.inputs)}
    known |= {str(name): v.const_value.numpy().tobytes() for name, v in model.graph.initializers.items()}
    numbers, found = {}, {}
    for node in model.graph:
        reads = tuple(None if v is None else known[str(v.name)] for v in node.inputs)
        told = tuple(sorted((name, str(a.value)) for name, a in node.attributes.items()))
        what = (
            reads[0]
            if node.op_type == "Identity"
            else numbers.setdefault((node.op_type, told, reads), f"#{len(numbers)} {node.op_type}")
        )
        known |= {str(v.name): (what, i) if i else what for i, v in enumerate(node.outputs)}
        if node.op_type != "Identity":
            found[node] = (node.op_type, told, reads)
    return found


# ---- what an action reads and gives ------------------------------------------------------------------------


@every("name", NETS)
@every("chunks", [2, 3, 4])
def test_what_another_chunk_reads_is_sent_and_no_weight_gradient_is(name, chunks):
    _, model = cut(NETS[name](), chunks)
    cuts = pieces(model, chunks)
    made = {n: (c, k) for c, p in enumerate(cuts) for k, part in enumerate(p[:3]) for n in part.outputs}
    for chunk, piece in enumerate(cuts):
        for kind, part in enumerate(piece[:3]):
            for read in part.inputs:
                home, by = made.get(read, (chunk, 0))
                assert by <= kind
                assert home == chunk or read in cuts[home][by].sent
                # Forwards from before, gradients from behind.
                assert home <= chunk if by == 0 else home >= chunk
                assert by < 2
        assert piece.weight_grad.sent == ()


def test_a_parameter_that_the_loss_does_not_reach_has_zeros():
    net = mlp(layers=2)
    idle = asarray(np.ones(3), name="idle")
    found = cut_stages({"loss": net.loss}, [net.params, idle], chunks=2)
    model = load(ir.to_proto(found.model)).model
    parts = run_chunks(model, pieces(model, 2), found.bound | net.batch(2))
    assert parts[found.grads[-1]].tolist() == [0.0, 0.0, 0.0]


def test_a_parameter_given_twice_is_one_input():
    net = tied()
    found = cut_stages({"loss": net.loss}, [net.params["w"], net.params["scale"], net.params["w"]], chunks=2)
    assert found.params == ("w", "scale", "w")


# ---- where to cut ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuts", "said"),
    [
        pytest.param(
            ["layer0", "nobody"], r"no node has the region 'nobody'; the graph has \['layer0'", id="unknown"
        ),
        pytest.param(
            ["layer1", "layer0"], r"chunk 0 \(region 'layer1'\) reads a Relu of chunk 1", id="backwards"
        ),
    ],
)
def test_regions_that_cannot_be_stages_are_refused(cuts, said):
    with pytest.raises(InputError, match=said):
        cut(mlp(layers=2), 2, cuts)


def test_fewer_nodes_than_chunks_are_refused():
    with pytest.raises(InputError, match="got 1 nodes to cut into 2 chunks"):
        cut_stages({"y": nn.relu(input("x", ("N",)))}, None, chunks=2)
