"""``genai_config.json``, with which onnxruntime-genai generates text with an exported decoder.

Format: https://onnxruntime.ai/docs/genai/reference/config.html. The runtime feeds token ids, an attention mask over
cached and new tokens, positions, and for each layer keys and values that hold every token so far.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from exportkit.onnx_files.translate import output_names
from exportkit.plan.leaves import PlannedLeaf
from exportkit.programs.program import TracedProgram

GENAI_CONFIG = "genai_config.json"
_KIND = "decoder"  # any decoder whose inputs and outputs the configuration names
_PAST = re.compile(r"past_key_values\.(?P<layer>\d+)\.(?P<state>key|value)")
_PLAIN = {"input_ids", "attention_mask", "position_ids"}
_REQUIRED = ("input_ids", "attention_mask")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def is_causal_decoder(traced: TracedProgram) -> bool:
    """Returns whether the model takes token ids and a cache of keys and values, and returns logits."""
    past = traced.plan.with_role("past")
    return past is not None and "input_ids" in traced.plan.by_path and "logits" in traced.outputs.tensors()


def window_limits(traced: TracedProgram) -> set[int]:
    """Returns the numbers of tokens of caches that hold no more than a sliding window."""
    return {growth.limit for growth in traced.outputs.growing.values() if growth.limit is not None}


def foreign_inputs(inputs: Iterable[str]) -> list[str]:
    """Returns those inputs of a graph that the runtime cannot give."""
    return [name for name in inputs if name not in _PLAIN and not _PAST.fullmatch(name)]


def genai_obstacle(traced: TracedProgram, inputs: Mapping[str, str], parts: Collection[str] = ()) -> str | None:
    """Returns why onnxruntime-genai cannot run the graph, or None if it can.

    Args:
        traced: The program.
        inputs: Path of the leaf by name of the graph's input.
        parts: Names of the parts that feed the model.
    """
    past = _past(traced, inputs)
    outputs = output_names(traced.output_paths, inputs)
    foreign = foreign_inputs(inputs)
    missing = [name for name in _REQUIRED if name not in inputs]
    positions = traced.plan.by_path.get("position_ids")
    wanted = [name.replace("past_key_values", "present") for name in past]
    if parts:
        return f"{', '.join(parts)} runs before the model, and only a single graph is configured for it"
    if foreign:
        return f"the graph has the input {foreign[0]!r}"
    if window_limits(traced):
        return "the caches hold a sliding window, and it keeps every token"
    if missing:
        return f"the graph has no input {missing[0]!r}"
    if not past or any(name not in outputs for name in ("logits", *wanted)):
        return "the graph does not return logits and the keys and values of each layer"
    if positions is not None and len(positions.sizes) != 2:
        return f"position_ids are of rank {len(positions.sizes)}"
    if len({tuple(map(str, leaf.sizes)) for leaf in past.values()}) > 1:
        return "its layers have caches of different shapes"
    return "the model's config does not say max_position_embeddings" if _context(traced) is None else None


def genai_config(traced: TracedProgram, inputs: Mapping[str, str], filename: str) -> dict[str, Any]:
    """Returns the configuration for a graph that `genai_obstacle` has nothing against.

    Args:
        traced: The program.
        inputs: Path of the leaf by name of the graph's input.
        filename: Name of the ONNX file.
    """
    past = _past(traced, inputs)
    heads, size = (next(iter(past.values())).sizes[axis].constant for axis in (1, 3))
    text, vocabulary = _text_config(traced), traced.outputs.tensors()["logits"].shape[-1]
    layers = len(past) // 2
    context = _context(traced)
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
        **_tokens(traced),
        "decoder": decoder,
    }
    search = {"do_sample": False, "num_beams": 1, "max_length": context, "past_present_share_buffer": False}
    return {"model": model, "search": search}


def _past(traced: TracedProgram, inputs: Mapping[str, str]) -> dict[str, PlannedLeaf]:
    """The cached keys and values among the graph's inputs, by name."""
    leaves = traced.plan.by_path
    return {name: leaves[path] for name, path in inputs.items() if _PAST.fullmatch(name)}


def _text_config(traced: TracedProgram) -> Any:
    config: Any = getattr(traced.model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _context(traced: TracedProgram) -> int | None:
    context: int | None = getattr(_text_config(traced), "max_position_embeddings", None)
    return context


def _tokens(traced: TracedProgram) -> dict[str, int | list[int]]:
    """Numbers of the tokens that begin, end and pad a text, as `generate` uses them."""
    source = getattr(traced.model, "generation_config", None) or _text_config(traced)
    return {name: value for name in _TOKENS if (value := getattr(source, name, None)) is not None}
