"""Captures what modules inside a model return: with a context for any model, or a decorator for one's own."""

from exportkit.capture.context import Captured, capture
from exportkit.capture.decorate import capture_outputs
from exportkit.capture.defaults import merge_with_config_defaults
from exportkit.capture.run import with_captured
from exportkit.capture.specs import OutputRecorder

__all__ = [
    "Captured",
    "OutputRecorder",
    "capture",
    "capture_outputs",
    "merge_with_config_defaults",
    "with_captured",
]
