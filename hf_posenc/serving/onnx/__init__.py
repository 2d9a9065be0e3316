"""ONNX graphs through torch's exporter, for any length, with a KV cache where a decoder's positions allow it."""
