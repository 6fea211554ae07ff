"""Engines from a bundle: TensorRT and TensorRT-RTX. Imports neither export nor runtime sessions."""
