"""transformers: caches, attention, declarations of models, vision helpers, and its own patches for exporting."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch

from exportkit._torch_compat import require

# Where a model class declares the outputs of inner modules that can be recorded: specs by key.
RECORDABLE_OUTPUTS = "_can_record_outputs"

# The attribute of a config that says which attention is computed.
ATTENTION = "_attn_implementation"
# The attribute behind it, which is set without changing the configs inside.
ATTENTION_STORED = "_attn_implementation_internal"

# The method of RecurrentGemma's recurrent unit that loops over tokens.
RECURRENT_SCAN = "_rnn_scan"

# The method by which audio encoders compute the mask of their states.
REDUCED_MASK = "_get_feature_vector_attention_mask"

# Where transformers keeps its functions of grids of patches.
VISION_MODULES = ("transformers.vision_utils", "transformers.utils.generic")


def cache_bases() -> tuple[type, ...]:
    """Returns the base classes of transformers' caches and cache layers, or () while it is not imported.

    Seen in transformers 5.23. Never imports transformers: objects of these classes exist only once it is loaded.
    """
    module = sys.modules.get("transformers.cache_utils")
    if module is None:
        return ()
    names = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer")
    return tuple(filter(None, map(vars(module).get, names)))


def cache_class(name: str) -> Any:
    """Returns a class of transformers' caches or cache layers, or None while transformers is not imported.

    Seen in transformers 5.23.
    """
    return getattr(sys.modules.get("transformers.cache_utils"), name, None)


def causal_mask_shortcut() -> tuple[Any, str] | None:
    """Returns the function that decides whether a causal mask is needed: its module and its name.

    None while transformers is not imported. In a trace, it always says yes, and compares sizes before. Seen in
    transformers 5.23.
    """
    owner, name = sys.modules.get("transformers.masking_utils"), "_ignore_causal_mask_sdpa"
    return None if owner is None or not hasattr(owner, name) else (owner, name)


def recordable_outputs(module: Any) -> Mapping[str, Any]:
    """Returns what a module declares as recordable, specs by key; empty if nothing. Seen in transformers 5.23."""
    return getattr(module, RECORDABLE_OUTPUTS, None) or {}


def attention_implementation(config: Any) -> str | None:
    """Returns which attention the modules with this config compute, or None if the config does not say.

    Seen in transformers 5.23.
    """
    value = getattr(config, ATTENTION, None)
    return value if isinstance(value, str) else None


def attention_property(config: Any) -> tuple[type, property] | None:
    """Returns the property that `attention_implementation` reads and its class, or None for a plain attribute.

    Seen in transformers 5.23.
    """
    for cls in type(config).__mro__:
        value = vars(cls).get(ATTENTION)
        if value is not None:
            return (cls, value) if isinstance(value, property) else None
    return None


def set_attention_implementation(config: Any, value: str) -> None:
    """Sets the value that `attention_implementation` returns, for this config but not for configs inside it.

    Seen in transformers 5.23.
    """
    setattr(config, ATTENTION_STORED if hasattr(config, ATTENTION_STORED) else ATTENTION, value)


def attention_functions() -> MutableMapping[str, Callable[..., Any]]:
    """Returns transformers' attention functions by name, which can be extended. Seen in transformers 5.23."""
    modeling = sys.modules["transformers.modeling_utils"]
    return require(modeling, "ALL_ATTENTION_FUNCTIONS", "transformers 5.23")  # type: ignore[no-any-return]


def can_choose_experts(module: Any) -> bool:
    """Returns whether the implementation of a model's experts can be chosen. Seen in transformers 5.23."""
    return bool(getattr(module, "_can_set_experts_implementation", bool)())


def compute_buffers(model: torch.nn.Module, path: str) -> None:
    """Makes a transformers model compute the buffers of one of its modules. Seen in transformers 5.23.

    Models of other libraries are left alone. Parameters of the module get new values too, if it has any.

    Args:
        model: The model, or a module around it.
        path: Path of the module.
    """
    parents: list[Any] = [
        model.get_submodule(".".join(path.split(".")[:depth])) for depth in range(path.count(".") + 1, -1, -1)
    ]
    compute = next((parent._init_weights for parent in parents if hasattr(parent, "_init_weights")), None)
    if callable(compute):
        with torch.no_grad():
            compute(model.get_submodule(path))


def as_encoder_forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that records hidden states and takes defaults from the config, as transformers' do.

    Seen in transformers 5.23.
    """
    generic, capturing = sys.modules["transformers.utils.generic"], sys.modules["transformers.utils.output_capturing"]
    with_outputs = require(capturing, "capture_outputs", "transformers 5.23")(function)
    return require(generic, "merge_with_config_defaults", "transformers 5.23")(with_outputs)  # type: ignore[no-any-return]


def interpolation_taps() -> Callable[..., Any]:
    """Returns the function that computes, along one axis, the entries of a resampled table and their weights.

    Seen in transformers 5.23.
    """
    module = sys.modules.get("transformers.vision_utils")
    return require(module, "_interpolation_axis_taps_weights", "transformers 5.23")  # type: ignore[no-any-return]


def exporter_patches(backend: str) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Returns transformers' export patches: owner, attribute, and a function from the original to the patch.

    They are read from its list instead of applied by its ``apply_patches``, so that undoing them restores everything.
    Seen in transformers 5.23.
    """
    utils = _exporter_module("utils")
    if utils is None or _exporter_module("exporter_onnx") is None:  # importing it registers them
        return []
    found = require(utils, "_PATCHES", "transformers 5.23").get(backend, [])
    resolve = require(utils, "import_dotted_path", "transformers 5.23")
    targets = [(resolve(path, missing_ok=True), name, make) for path, name, make in found]
    # This patch assumes that all images have the same size, and is silently wrong otherwise.
    left_out = ("_patch_chunked_vision_attention",)
    return [
        (target, name, make)
        for target, name, make in targets
        if target is not None and getattr(make, "__name__", "") not in left_out
    ]


class ExporterTranslations(NamedTuple):
    """What transformers adds to a translation to ONNX.

    Attributes:
        table: Functions that translate operators.
        fix_nodes: Changes the nodes of a traced module in place.
        fix_program: Changes a translated program in place.
    """

    table: dict[Any, Any]
    fix_nodes: Callable[[torch.fx.GraphModule], None]
    fix_program: Callable[[Any], None]


def exporter_translations() -> ExporterTranslations | None:
    """Returns transformers' translations, or None if it is not installed or has none. Seen in transformers 5.23."""
    utils, onnx = _exporter_module("utils"), _exporter_module("exporter_onnx")
    if utils is None or onnx is None:
        return None
    fix_nodes = require(utils, "apply_fx_node_fixes", "transformers 5.23")
    return ExporterTranslations(
        dict(require(onnx, "_ONNX_TRANSLATION_TABLE", "transformers 5.23")),
        functools.partial(fix_nodes, "onnx"),
        require(onnx, "apply_onnx_ir_fixes", "transformers 5.23"),
    )


def _exporter_module(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"transformers.exporters.{name}")
    except ImportError:
        return None
