"""The answers of torch.onnx.InputObserver and yobx, built from recorded calls."""
