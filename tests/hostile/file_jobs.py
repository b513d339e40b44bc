"""What may happen to a model's files while a graph of it lives, done to a small model in a child of the zygote."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import numpy as np
import onnx
from onnx import TensorProto

import dask_ferro as ff
from tests import graphs

SIZE = 64  # the weight has 16 KiB: four times what is always read into memory
X = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32)
# Rounds of a compute beside a thread that changes the file all the time.
ROUNDS = 12


def weight(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((SIZE, SIZE)).astype(np.float32)


def written(folder: Path, seed: int, kind: str) -> Path:
    """Write model.onnx (y = relu(x * w): no session packs w), with w in it or in weights.bin; the file with w."""
    nodes = "[product] h = Mul (x, w) y = Relu (h)"
    text = f"(float[N,{SIZE}] x) => (float[N,{SIZE}] y) {{ {nodes} }}"
    model = graphs.written(text, {"w": weight(seed)}, opset=17)
    path = folder / "model.onnx"
    if kind == "model":
        path.write_bytes(model.SerializeToString())
        return path
    tensor = model.graph.initializer[0]
    (folder / "weights.bin").write_bytes(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    path.write_bytes(onnx.ModelProto.SerializeToString(model))
    return folder / "weights.bin"


def changes(folder: Path, kind: str, target: Path) -> dict[str, Callable[[], object]]:
    """What happens to the file, by name."""
    other = folder / "other"
    other.mkdir()
    content = written(other, 1, kind).read_bytes()
    before = os.stat(target)

    def rewrite() -> None:
        with target.open("r+b") as file:
            file.write(content)
        os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))  # as `cp -p` and rsync leave it

    def replace() -> None:
        (folder / "new").write_bytes(content)
        os.replace(folder / "new", target)

    def export() -> None:  # what exporters do: cut to nothing, then written
        target.write_bytes(content)

    return {
        "rewrite": rewrite,
        "truncate": lambda: target.open("wb").close(),
        "cut": lambda: os.truncate(target, before.st_size // 2),
        "export": export,
        "replace": replace,
        "delete": lambda: target.unlink(missing_ok=True),
    }


def changed(
    folder: str, kind: str, how: str, when: str, scheduler: str, mapped: bool, granularity: str
) -> list[str]:
    """Return how each compute ended: "right", "named" (an error that names the file), or what else it was."""
    target = written(Path(folder), 0, kind)
    change = changes(Path(folder), kind, target)[how]
    above = {"ferro.limits.mapped-above": 0} if mapped else {}
    with dask.config.set({"scheduler": scheduler, **above}):
        graph = ff.from_onnx(Path(folder) / "model.onnx", X, granularity=granularity)
        if when == "before":
            change()
            return [verdict(graph, target)]
        first = verdict(graph, target)
        if when == "between":
            change()
            return [first, verdict(graph, target)]
        return [first, *_beside(graph, target, change)]


def _beside(graph: Any, target: Path, change: Callable[[], object]) -> list[str]:
    over = threading.Event()

    def keep_changing() -> None:
        while not over.wait(0.0005):
            change()

    thread = threading.Thread(target=keep_changing)
    thread.start()
    try:
        return [verdict(graph, target) for _ in range(ROUNDS)]
    finally:
        over.set()
        thread.join(10)


def verdict(graph: Any, target: Path) -> str:
    """How a compute ended."""
    try:
        found = graph.compute()
    except ff.InputError as error:
        return "named" if target.name in str(error) or "model.onnx" in str(error) else f"unnamed: {error}"
    except Exception as error:  # noqa: BLE001 - what it is, is what is asked
        return f"{type(error).__name__}: {error}"
    expected = np.maximum(X * weight(0), 0)
    return "right" if np.allclose(found, expected, rtol=1e-4, atol=1e-4) else "wrong numbers"
