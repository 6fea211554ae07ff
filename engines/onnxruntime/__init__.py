"""The bundle's graphs, rewritten for ONNX Runtime's CPU provider."""
