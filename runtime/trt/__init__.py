"""A pair on TensorRT or TensorRT-RTX."""
