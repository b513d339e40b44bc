"""What one ONNX Runtime session makes of a whole model.

A module of its own, for a process that is to import little and to give its memory back: VGG-19 takes 1 GB for a moment.
"""

from __future__ import annotations

from multiprocessing import get_context

import numpy as np
import onnxruntime as ort


def whole_model(path: str, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return the outputs, in the model's order."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, feeds)


def apart(path: str, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return the same, computed by another process."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(whole_model, (path, feeds))
