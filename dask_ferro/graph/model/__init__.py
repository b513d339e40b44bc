"""Loading of models: an ONNX file, bytes or a `ModelProto` becomes a checked `onnx_ir.Model` in one form."""
