"""Engines from the bundle's graphs, with either TensorRT."""
