"""Checks of attribute values that make native code hang or end the process.

ONNX's inference never returns from some equations of Einsum ("....a->a"), and holds the interpreter's lock meanwhile;
ONNX Runtime divides by strides, groups and block sizes.  So their texts and numbers are judged here, in Python, before
anything native reads them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

import onnx

# Operators with more letters than this have no use, and inference is cubic in them.
_LETTERS = 52
_TERM = re.compile(r"[A-Za-z]*(?:\.\.\.)?[A-Za-z]*")
# Attributes that are divided by, or counted down to: each number is at least 1.
_POSITIVE: Mapping[str, tuple[str, ...]] = {
    "AveragePool": ("kernel_shape", "strides", "dilations"),
    "Col2Im": ("strides", "dilations"),
    "Conv": ("kernel_shape", "strides", "dilations", "group"),
    "ConvInteger": ("kernel_shape", "strides", "dilations", "group"),
    "ConvTranspose": ("kernel_shape", "strides", "dilations", "group"),
    "DepthToSpace": ("blocksize",),
    "GroupNormalization": ("num_groups",),
    "LpPool": ("kernel_shape", "strides", "dilations"),
    "LRN": ("size",),
    "MaxPool": ("kernel_shape", "strides", "dilations"),
    "MaxUnpool": ("kernel_shape", "strides"),
    "QLinearConv": ("kernel_shape", "strides", "dilations", "group"),
    "SpaceToDepth": ("blocksize",),
    "Split": ("num_outputs",),
}
# No tensor has more axes, here or in any engine; and numpy takes an axis of -2^31 as all of them.
_RANK = 64
# Kernels count in 32 bits, and the product of two larger numbers overflows 64.
_MOST = 1 << 31


def problems(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the problems of a standard operator's attribute values, as sentences."""
    held = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type == "Einsum" and "equation" in held:
        yield from equation_problems(held["equation"].s.decode("utf-8", "replace"), len(node.input))
    for name in ("axis", "axes"):
        numbers = [*held[name].ints, held[name].i] if name in held else []
        if wrong := [number for number in numbers if not -_RANK <= number < _RANK]:
            yield f"its attribute {name!r} has {wrong[0]}, and no tensor has so many axes"
    for name in _POSITIVE.get(node.op_type, ()):
        if name in held:
            numbers = held[name].ints or [held[name].i]
            wrong = [number for number in numbers if not 1 <= number < _MOST]
            if wrong:
                yield f"its attribute {name!r} has {wrong[0]}; wanted numbers from 1 to 2^31"


def equation_problems(equation: str, inputs: int) -> Iterator[str]:
    """Yield the problems of an Einsum equation on `inputs` operands, by ONNX's grammar.

    Examples
    --------
    >>> list(equation_problems("ij,jk->ik", 2))
    []
    >>> list(equation_problems("....a->a", 1))
    ["its equation '....a->a' has the term '....a'; wanted letters and at most one '...'"]
    """
    shown = repr(equation if len(equation) <= 80 else f"{equation[:80]}...")
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    for term in [*terms, *([right] if arrow else [])]:
        if not _TERM.fullmatch(term) or len(term) > _LETTERS + 3:
            yield f"its equation {shown} has the term {term[:80]!r}; wanted letters and at most one '...'"
            return
    if len(terms) != inputs:
        yield f"its equation {shown} has {len(terms)} terms for {inputs} inputs; wanted one each"
    labels = right.replace("...", "")
    doubled = sorted({letter for letter in labels if labels.count(letter) > 1})
    unknown = sorted(set(labels).difference(left))
    if doubled or unknown:
        which = ", ".join(map(repr, doubled or unknown))
        why = "twice in its result" if doubled else "in its result and in no term"
        yield f"its equation {shown} has {which} {why}"


def sleep_problems(node: onnx.NodeProto, longest: float) -> Iterator[str]:
    """Yield the problems of a Sleep, which may take `longest` seconds, as sentences."""
    problem = sleep_problem(sum(a.f for a in node.attribute if a.name == "seconds"), longest)
    if problem is not None:
        yield problem


def sleep_problem(seconds: float, longest: float) -> str | None:
    """Return why a Sleep may not take `seconds`, None if it may."""
    if not math.isfinite(seconds) or seconds < 0:
        return f"it sleeps for {seconds:g} s; wanted a finite number of seconds, 0 or more"
    if seconds > longest:
        return (
            f"it sleeps for {seconds:g} s, and models that dask_ferro did not make may for {longest:g} s; make it in "
            "this process, by ff.workloads"
        )
    return None
