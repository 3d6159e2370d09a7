"""Run a PyTorch model as usual; exportkit infers what varies, exports the model, and proves the result.

The public names are imported when they are first used, so ``import exportkit`` itself is fast.

Example:
    >>> import torch, exportkit
    >>> model, observer = torch.nn.Linear(4, 2), exportkit.InputObserver()
    >>> with observer(model):
    ...     _ = model(torch.ones(3, 4))
    >>> exported = exportkit.export(model, observer)
"""

import importlib as _importlib

__version__ = "0.1.0"

# The file that defines each public name; None for a name that is itself a module, one that can be called.
# `__init__.pyi` says the same to type checkers, and a test compares the two.
_DEFINED_IN = {
    # observe
    "InputObserver": "api.observer",
    "Observation": "calls.observation",
    "Call": "calls.call",
    # reason
    "Plan": "plan.plan",
    "Expression": "plan.expression",
    # export and prove
    "export": None,
    "load": "api.onnx_model",
    "Exported": "api.exported",
    "OnnxModel": "api.onnx_model",
    "Quantisation": "onnx_files.quantised",
    "compare_runs": "api.application",
    "Report": "proof.report",
    "show_progress": "programs.stages",
    # capture what modules return
    "capture": None,
    "capture_outputs": "module_outputs.decorate",
    "OutputRecorder": "module_outputs.record",
    "merge_with_config_defaults": "module_outputs.decorate",
    # record module calls
    "trace_model": "module_traces.trace",
    "locate_divergence": "divergence.locate",
    "model_addition_debugger_context": "peers.debugger",
    "Trace": "module_traces.trace",
    # replace classes
    "register_patch_mapping": "swapping.mapping",
    "unregister_patch_mapping": "swapping.mapping",
    "get_patch_mapping": "swapping.mapping",
    "clear_patch_mapping": "swapping.mapping",
    "apply_patches": "swapping.swap",
    "patch_output_recorders": "swapping.swap",
    "check_patch": "swapping.check",
    # nested values and caches
    "register_flattening_functions": "trees.registry",
    "make_dynamic_cache": "trees.caches",
    "make_static_cache": "trees.caches",
    "make_encoder_decoder_cache": "trees.caches",
    "string_type": "trees.tree",
    # test suites
    "scan_skipped_tests": "skipscan",
    # errors
    "ExportkitError": "errors",
}

__all__ = list(_DEFINED_IN)  # the names are strings


def __getattr__(name: str) -> object:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = _DEFINED_IN[name]
    if file is None:
        return _importlib.import_module(f"{__name__}.{name}")
    value = globals()[name] = getattr(_importlib.import_module(f"{__name__}.{file}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
