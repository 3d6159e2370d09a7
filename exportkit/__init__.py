"""Run a PyTorch model as always; exportkit works out what varies, exports it, and proves the result.

Example:
    >>> import torch, exportkit
    >>> model, observer = torch.nn.Linear(4, 2), exportkit.InputObserver()
    >>> with observer(model):
    ...     _ = model(torch.ones(3, 4))
    >>> exported = exportkit.export(model, observer)
"""

from exportkit.arguments.build import Arguments
from exportkit.calls.observation import Call, Observation
from exportkit.calls.observer import InputObserver
from exportkit.divergence.locate import locate_divergence
from exportkit.errors import ExportkitError
from exportkit.folder.folder import load_folder as load
from exportkit.module_outputs.context import capture
from exportkit.module_outputs.decorate import capture_outputs, merge_with_config_defaults
from exportkit.module_outputs.specs import OutputRecorder
from exportkit.module_traces.debugger import model_addition_debugger_context
from exportkit.module_traces.record import trace_model
from exportkit.module_traces.trace import Trace
from exportkit.onnx_files.onnx_model import OnnxModel
from exportkit.onnx_files.onnx_programs import OnnxPrograms
from exportkit.plan.expression import Expression
from exportkit.plan.plan import Plan
from exportkit.programs.exported import Exported
from exportkit.programs.make import export
from exportkit.programs.programs import ExportedPrograms
from exportkit.proof.report import Report
from exportkit.report.progress import show_progress
from exportkit.skips import scan_skipped_tests
from exportkit.swapping.check import check_patch
from exportkit.swapping.mapping import (
    clear_patch_mapping,
    get_patch_mapping,
    register_patch_mapping,
    unregister_patch_mapping,
)
from exportkit.swapping.recorders import patch_output_recorders
from exportkit.swapping.swap import apply_patches
from exportkit.trees import (
    make_dynamic_cache,
    make_encoder_decoder_cache,
    make_static_cache,
    register_flattening_functions,
    string_type,
)

__version__ = "0.1.0"

__all__ = [
    # observe
    "InputObserver",
    "Observation",
    "Call",
    # reason
    "Plan",
    "Expression",
    # build
    "Arguments",
    # export and prove
    "export",
    "load",
    "Exported",
    "ExportedPrograms",
    "OnnxModel",
    "OnnxPrograms",
    "Report",
    "show_progress",
    # capture what modules return
    "capture",
    "capture_outputs",
    "OutputRecorder",
    "merge_with_config_defaults",
    # record module calls
    "trace_model",
    "locate_divergence",
    "model_addition_debugger_context",
    "Trace",
    # replace classes
    "register_patch_mapping",
    "unregister_patch_mapping",
    "get_patch_mapping",
    "clear_patch_mapping",
    "apply_patches",
    "patch_output_recorders",
    "check_patch",
    # nested values and caches
    "register_flattening_functions",
    "make_dynamic_cache",
    "make_static_cache",
    "make_encoder_decoder_cache",
    "string_type",
    # test suites
    "scan_skipped_tests",
    # errors
    "ExportkitError",
]
