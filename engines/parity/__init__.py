"""Engines compared with ONNX Runtime, call by call."""
