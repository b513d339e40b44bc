"""Functions of tensors compared with PyTorch: values, and the gradients of all floating point arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.tensor.tensor import asarray, input
from tests.graph.tensor.runs import values

torch = pytest.importorskip("torch")


def compare(ours: Any, theirs: Any, arrays: tuple[np.ndarray, ...], rtol: float = 1e-9) -> None:
    """Compare the values, and the gradients of the product of the values with a weight."""
    leaves = [torch.tensor(a, requires_grad=True) for a in arrays]
    wanted = theirs(*leaves)
    weight = np.random.default_rng(5).standard_normal(tuple(wanted.shape))
    (wanted * torch.tensor(weight)).sum().backward()
    params = [input(f"x{i}", a.shape, a.dtype) for i, a in enumerate(arrays)]
    y = ours(*params)
    slopes = grad((y * asarray(weight, y.dtype)).sum(), params)
    found = values({"y": y, **{f"d{i}": g for i, g in enumerate(slopes)}},
        {f"x{i}": a for i, a in enumerate(arrays)}, params)  # fmt: skip
    np.testing.assert_allclose(found["y"], wanted.detach().numpy(), rtol=rtol, atol=1e-12)
    for i, leaf in enumerate(leaves):
        np.testing.assert_allclose(found[f"d{i}"], leaf.grad.numpy(), rtol=rtol, atol=1e-12, err_msg=f"x{i}")
