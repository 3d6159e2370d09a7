"""The public names, for type checkers: see `__init__.py`, which imports them when they are first used."""

from exportkit.api.application import compare_runs as compare_runs
from exportkit.api.export import export as export
from exportkit.api.exported import Exported as Exported
from exportkit.api.observer import InputObserver as InputObserver
from exportkit.api.onnx_model import OnnxModel as OnnxModel
from exportkit.api.onnx_model import load as load
from exportkit.calls.call import Call as Call
from exportkit.calls.observation import Observation as Observation
from exportkit.divergence.locate import locate_divergence as locate_divergence
from exportkit.errors import ExportkitError as ExportkitError
from exportkit.module_outputs.context import capture as capture
from exportkit.module_outputs.decorate import capture_outputs as capture_outputs
from exportkit.module_outputs.decorate import merge_with_config_defaults as merge_with_config_defaults
from exportkit.module_outputs.record import OutputRecorder as OutputRecorder
from exportkit.module_traces.trace import Trace as Trace
from exportkit.module_traces.trace import trace_model as trace_model
from exportkit.onnx_files.quantised import Quantisation as Quantisation
from exportkit.peers.debugger import model_addition_debugger_context as model_addition_debugger_context
from exportkit.plan.expression import Expression as Expression
from exportkit.plan.plan import Plan as Plan
from exportkit.programs.stages import show_progress as show_progress
from exportkit.proof.report import Report as Report
from exportkit.skipscan import scan_skipped_tests as scan_skipped_tests
from exportkit.swapping.check import check_patch as check_patch
from exportkit.swapping.mapping import clear_patch_mapping as clear_patch_mapping
from exportkit.swapping.mapping import get_patch_mapping as get_patch_mapping
from exportkit.swapping.mapping import register_patch_mapping as register_patch_mapping
from exportkit.swapping.mapping import unregister_patch_mapping as unregister_patch_mapping
from exportkit.swapping.swap import apply_patches as apply_patches
from exportkit.swapping.swap import patch_output_recorders as patch_output_recorders
from exportkit.trees.caches import make_dynamic_cache as make_dynamic_cache
from exportkit.trees.caches import make_encoder_decoder_cache as make_encoder_decoder_cache
from exportkit.trees.caches import make_static_cache as make_static_cache
from exportkit.trees.registry import register_flattening_functions as register_flattening_functions
from exportkit.trees.tree import string_type as string_type

__version__: str
