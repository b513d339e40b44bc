"""ONNX graphs: checked, typed, priced, and cut into bundles.

A graph is an `onnx_ir.Model`; everything here takes one, or plain integers, and returns values.  Nothing
here knows Dask, workers or engines.  `model` reads and checks, `ir` types, `cost` prices,
`bundling` cuts, `workloads` makes.
"""
