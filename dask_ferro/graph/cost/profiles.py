"""The speed of graphics cards by name, and the profile of each engine on a card.

Arithmetic and memory rates are from the data sheets (dense, no sparsity), so they are upper bounds.  The profiles only
compare engines, so a share of the rates that both engines reach cancels out; projected seconds of tasks are corrected
by those measured on the worker.  "library alone" in `benchmarks/gpu.py` measures what a card reaches.

The engines differ in two figures.  *Passes*: the array table makes a LayerNormalization of 13 array calls, each a
kernel that goes through memory, where ONNX Runtime has one kernel.  *Node overhead*: a CuPy call is dispatched by
Python.  Rates are per second, sizes bytes, durations seconds.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from dask_ferro.graph.cost.roofline import DeviceProfile
from dask_ferro.graph.ir.nodes import Operands, Types

__all__ = ["CARDS", "UNKNOWN", "Card", "array_profile", "card", "is_stacked", "session_profile"]


class Card(NamedTuple):
    """A card's data sheet.

    Attributes
    ----------
    name : str
    float32, tf32 : float
        FLOP/s of matrix products; `tf32` is `float32` where a card has none.
    memory, host : float
        Bytes/s of the card's memory, and of its link to the host, one way.
    """

    name: str
    float32: float
    tf32: float
    memory: float
    host: float


_PCIE_3, _PCIE_4, _PCIE_5 = 12e9, 24e9, 48e9  # 16 lanes, about three quarters of the line rate

# A card's row is the first whose words are all in the driver's name for it, so more specific rows come first.
CARDS = (
    Card("H200", 67e12, 494e12, 4.8e12, _PCIE_5),
    Card("H100 PCIe", 51e12, 378e12, 2.0e12, _PCIE_5),
    Card("H100", 67e12, 494e12, 3.35e12, _PCIE_5),
    Card("A100 80GB", 19.5e12, 156e12, 2.0e12, _PCIE_4),
    Card("A100", 19.5e12, 156e12, 1.55e12, _PCIE_4),
    Card("A30", 10.3e12, 82e12, 0.93e12, _PCIE_4),
    Card("L40S", 91.6e12, 183e12, 0.86e12, _PCIE_4),
    Card("L4", 30.3e12, 60e12, 0.30e12, _PCIE_4),
    Card("V100", 15.7e12, 15.7e12, 0.90e12, _PCIE_3),
    Card("T4", 8.1e12, 8.1e12, 0.30e12, _PCIE_3),
)
# Any other card: as slow as the slowest row, so that nodes go to such a card only for a clear gain.
UNKNOWN = Card("unknown", 8.1e12, 8.1e12, 0.30e12, _PCIE_3)


def card(name: str) -> Card:
    """Return the row of a card by the driver's name for it.

    >>> card("NVIDIA A100-SXM4-80GB").name, card("Tesla T4").name, card("GeForce GT 710").name
    ('A100 80GB', 'T4', 'unknown')
    """
    words = set(name.replace("-", " ").split())
    return next((row for row in CARDS if words.issuperset(row.name.split())), UNKNOWN)


# Array calls of an operator in the array table, without views, counted with `array_api_strict`.  Elementwise operators
# are fused into one kernel each; operators of one call are left out.
_ARRAY_CALLS = {
    "Gemm": 2.0,
    "Conv": 3.0,
    "BatchNormalization": 3.0,
    "MaxPool": 4.0,
    "AveragePool": 6.0,
    "Softmax": 5.0,
    "LogSoftmax": 6.0,
    "RMSNormalization": 7.0,
    "InstanceNormalization": 12.0,
    "LayerNormalization": 13.0,
    "Attention": 22.0,
    "GRU": 18.0,  # a step of the sequence
    "LSTM": 24.0,
}
# Matrix products reach the card's arithmetic rate; all other operators are bound by memory.
_PRODUCTS = ("MatMul", "Gemm", "Einsum", "Attention", "LSTM", "GRU", "RNN")
# Operators that the array table computes as batched products.
_STACKED = ("Einsum", "Attention")
# A convolution by matrix product first writes each pixel once per tap, so a 3 x 3 one is bound by memory.
_UNFOLDED_CONVOLUTION, _LIBRARY_CONVOLUTION = 0.15, 0.6
_OTHER = 0.1
# The dispatch of one CuPy call, and of one node in a session: part `calls` of `benchmarks/gpu.py` on an H100.
_ARRAY_CALL_S, _SESSION_NODE_S = 8e-6, 4e-6


def array_profile(row: Card, *, tf32: bool = False) -> DeviceProfile:
    """Return the array table's profile on a card; `tf32` does not apply to batched products.

    CuPy computes those in float32: convolutions, attention, einsums, and a MatMul that `is_stacked`.
    """
    plain = row.float32 / _flops(row, tf32)
    efficiency = (
        dict.fromkeys(_PRODUCTS, 1.0)
        | dict.fromkeys(_STACKED, plain)
        | dict.fromkeys(("Conv", "ConvTranspose"), _UNFOLDED_CONVOLUTION * plain)
    )
    return DeviceProfile(
        f"{row.name}, array", _flops(row, tf32), row.memory, _ARRAY_CALL_S, efficiency, _OTHER, _ARRAY_CALLS
    )


def session_profile(row: Card, *, tf32: bool = False) -> DeviceProfile:
    """Return the profile of ONNX Runtime's CUDA kernels on a card."""
    efficiency = dict.fromkeys(_PRODUCTS, 1.0) | dict.fromkeys(
        ("Conv", "ConvTranspose"), _LIBRARY_CONVOLUTION
    )
    return DeviceProfile(
        f"{row.name}, onnxruntime", _flops(row, tf32), row.memory, _SESSION_NODE_S, efficiency, _OTHER
    )


def is_stacked(node: ir.Node, types: Types) -> bool:
    """Return whether a node is a MatMul whose right factor is not a matrix, or of unknown rank."""
    return node.op_type == "MatMul" and len(Operands(node, types).shape(1)) != 2


def _flops(row: Card, tf32: bool) -> float:
    return row.tf32 if tf32 else row.float32
