"""Runs a bundle. Imports no torch, transformers, onnx or polygraphy, and neither export nor engines."""
