"""Translates exported programs into ONNX files and runs them."""
