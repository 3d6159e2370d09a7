"""Proves an ONNX model against the eager model on recorded calls and at other sizes."""
