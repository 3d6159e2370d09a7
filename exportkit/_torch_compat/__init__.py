"""Every private name of torch, transformers and onnxscript that exportkit uses, by topic.

No other room uses a private name. Each function says in which version it was seen; one that is gone raises
CompatibilityError, so that an upgrade fails with a sentence and not with an AttributeError.
"""
