"""Runs a call (eager model, exported program, ONNX Runtime) and compares what is returned."""
