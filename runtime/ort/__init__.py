"""A pair on ONNX Runtime."""
