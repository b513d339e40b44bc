"""From an ONNX file, bytes or a `ModelProto` to one checked `onnx_ir.Model` in one form."""
