"""Rewrites that TensorRT needs, one a file."""
