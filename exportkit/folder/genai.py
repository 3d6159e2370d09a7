"""``genai_config.json``: what onnxruntime-genai needs to know to generate text with an exported decoder.

In come an export and the inputs of its graph; out goes the configuration, or why this runtime cannot run the graph.
Format: https://onnxruntime.ai/docs/genai/reference/config.html. The runtime feeds token ids, an attention mask over
stored and new tokens, positions, and for each layer keys and values that hold every token so far.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from exportkit.onnx_files.names import output_names
from exportkit.plan.leaves import PlannedLeaf

if TYPE_CHECKING:
    from exportkit.programs.exported import Exported

GENAI_CONFIG = "genai_config.json"
_KIND = "decoder"  # any decoder whose inputs and outputs the configuration names
_PAST = re.compile(r"past_key_values\.(?P<layer>\d+)\.(?P<state>key|value)")
_PLAIN = {"input_ids", "attention_mask", "position_ids"}
_REQUIRED = ("input_ids", "attention_mask")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def is_causal_decoder(exported: Exported) -> bool:
    """Returns whether the model takes token ids and a cache of keys and values, and returns logits."""
    past = exported.plan.with_role("past")
    return past is not None and "input_ids" in exported.plan.by_path and "logits" in exported.outputs.tensors()


def window_limits(exported: Exported) -> set[int]:
    """Returns how many tokens the caches hold that hold no more than a sliding window."""
    return {growth.limit for growth in exported.outputs.growing.values() if growth.limit is not None}


def foreign_inputs(inputs: Iterable[str]) -> list[str]:
    """Returns which of a graph's inputs the runtime has nothing to give to."""
    return [name for name in inputs if name not in _PLAIN and not _PAST.fullmatch(name)]


def genai_obstacle(exported: Exported, inputs: Mapping[str, str]) -> str | None:
    """Returns why onnxruntime-genai cannot run the graph, or None if it can.

    Args:
        exported: The export.
        inputs: Path of the leaf by name of the graph's input.
    """
    past = _past(exported, inputs)
    outputs = output_names(exported.captured.output_paths, inputs)
    foreign = foreign_inputs(inputs)
    missing = [name for name in _REQUIRED if name not in inputs]
    positions = exported.plan.by_path.get("position_ids")
    wanted = [name.replace("past_key_values", "present") for name in past]
    if exported.parts:
        return f"{', '.join(exported.parts)} runs before the model, and only a single graph is configured for it"
    if foreign:
        return f"the graph has the input {foreign[0]!r}"
    if window_limits(exported):
        return "caches that hold a sliding window, where it keeps every token"
    if missing:
        return f"the graph has no input {missing[0]!r}"
    if not past or any(name not in outputs for name in ("logits", *wanted)):
        return "the graph does not return logits and the keys and values of each layer"
    if positions is not None and len(positions.sizes) != 2:
        return f"position_ids are of rank {len(positions.sizes)}"
    if len({tuple(map(str, leaf.sizes)) for leaf in past.values()}) > 1:
        return "its layers have caches of different shapes"
    return "the model's config does not say max_position_embeddings" if _context(exported) is None else None


def genai_config(exported: Exported, inputs: Mapping[str, str], filename: str) -> dict[str, Any]:
    """Returns the configuration for a graph that `genai_obstacle` has nothing against.

    Args:
        exported: The export.
        inputs: Path of the leaf by name of the graph's input.
        filename: Name of the ONNX file.
    """
    past = _past(exported, inputs)
    heads, size = (next(iter(past.values())).sizes[axis].constant for axis in (1, 3))
    text, vocabulary = _text_config(exported), exported.outputs.tensors()["logits"].shape[-1]
    layers = len(past) // 2
    context = _context(exported)
    decoder: dict[str, Any] = {
        "session_options": {"provider_options": []},
        "filename": filename,
        "head_size": size,
        "hidden_size": getattr(text, "hidden_size", heads * size),
        "num_attention_heads": getattr(text, "num_attention_heads", heads),
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "inputs": {
            **{name: name for name in inputs if name in _PLAIN},
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    model = {
        "type": _KIND,
        "vocab_size": vocabulary,
        "context_length": context,
        **_tokens(exported),
        "decoder": decoder,
    }
    search = {"do_sample": False, "num_beams": 1, "max_length": context, "past_present_share_buffer": False}
    return {"model": model, "search": search}


def _past(exported: Exported, inputs: Mapping[str, str]) -> dict[str, PlannedLeaf]:
    """The cached keys and values among the graph's inputs, by name."""
    leaves = exported.plan.by_path
    return {name: leaves[path] for name, path in inputs.items() if _PAST.fullmatch(name)}


def _text_config(exported: Exported) -> Any:
    config: Any = getattr(exported.model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _context(exported: Exported) -> int | None:
    context: int | None = getattr(_text_config(exported), "max_position_embeddings", None)
    return context


def _tokens(exported: Exported) -> dict[str, int | list[int]]:
    """Numbers of the tokens that begin, end and pad a text, as `generate` uses them."""
    source = getattr(exported.model, "generation_config", None) or _text_config(exported)
    return {name: value for name in _TOKENS if (value := getattr(source, name, None)) is not None}
