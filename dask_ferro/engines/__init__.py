"""How a bundle is computed, on arrays it is handed.  Knows ONNX nodes and engines; has never heard of Dask.

`selection` says ahead of time which engine computes which node, `executable` strings the engines of one bundle
together, `device_executable` does so on a GPU, `device.residency` knows what lies there; `cache` keeps what was built.
The engines:
`onnxruntime` (a whole run of nodes as one session), `array` (node by node on the array-API namespace of the
arguments), `reference` (the onnx package's own ops).
"""
