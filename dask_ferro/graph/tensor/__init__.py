"""Lazy tensors: array math that is written down, and from which ONNX is made."""
