"""ONNX Runtime as an engine: its sessions, its declarations and its known defects."""

# The provider of the CPU.
HOST = "CPUExecutionProvider"
