"""Traces of module calls: record a run, read what every module was given and returned."""

from exportkit.tracing.debugger import model_addition_debugger_context
from exportkit.tracing.record import trace_model
from exportkit.tracing.records import ModuleCall, TensorRecord
from exportkit.tracing.trace import Trace

__all__ = ["ModuleCall", "TensorRecord", "Trace", "model_addition_debugger_context", "trace_model"]
