"""Traces of module calls: record a run, read what every module was given and returned, find where two runs part."""

from exportkit.tracing.comparison import Comparison
from exportkit.tracing.debugger import model_addition_debugger_context
from exportkit.tracing.locate import locate_divergence
from exportkit.tracing.locate_outputs import locate_outputs
from exportkit.tracing.located import Located
from exportkit.tracing.record import trace_model
from exportkit.tracing.records import ModuleCall, TensorRecord
from exportkit.tracing.trace import Trace

__all__ = [
    "Comparison",
    "Located",
    "ModuleCall",
    "TensorRecord",
    "Trace",
    "locate_divergence",
    "locate_outputs",
    "model_addition_debugger_context",
    "trace_model",
]
