"""ONNX Runtime as an engine: its sessions, what it declares, and where it is known to be wrong."""
