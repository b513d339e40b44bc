"""Lazy tensors: array math recorded as ONNX nodes."""
