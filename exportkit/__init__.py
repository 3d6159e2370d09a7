"""Run a PyTorch model as always; exportkit works out what varies, exports it, and proves the result.

Example:
    >>> import torch, exportkit
    >>> model, observer = torch.nn.Linear(4, 2), exportkit.InputObserver()
    >>> with observer(model):
    ...     _ = model(torch.ones(3, 4))
    >>> exported = exportkit.export(model, observer)
"""

from exportkit.arguments import Arguments
from exportkit.axes import Expression, Plan
from exportkit.capture import OutputRecorder, capture, capture_outputs, merge_with_config_defaults
from exportkit.errors import ExportkitError
from exportkit.export import Exported, ExportedPrograms, OnnxModel, OnnxPrograms, export
from exportkit.export import load_folder as load
from exportkit.observe import Call, InputObserver, Observation
from exportkit.patching import (
    apply_patches,
    check_patch,
    clear_patch_mapping,
    get_patch_mapping,
    patch_output_recorders,
    register_patch_mapping,
    unregister_patch_mapping,
)
from exportkit.report.progress import show_progress
from exportkit.skips import scan_skipped_tests
from exportkit.tracing import Trace, locate_divergence, model_addition_debugger_context, trace_model
from exportkit.trees import (
    make_dynamic_cache,
    make_encoder_decoder_cache,
    make_static_cache,
    register_flattening_functions,
    string_type,
)
from exportkit.verify import Report

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
