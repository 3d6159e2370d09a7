"""Files beside the graphs that clients read, and exports that a given client can run.

These are ``config.json`` and ``generation_config.json`` of a transformers model and, for causal language models,
``genai_config.json`` of onnxruntime-genai. A runtime that allocates caches itself, all of one length, cannot run
sliding windows; such a model is exported again with caches that hold every token.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from exportkit.arguments.build import build_call
from exportkit.calls.call import Call
from exportkit.errors import ExportError, InvalidRequestError
from exportkit.onnx_files.contract import Contract, Runtime, input_names, output_names
from exportkit.plan.leaves import Finding, PlannedLeaf
from exportkit.probing.planning import plan_calls
from exportkit.programs.exported import ExportedModel
from exportkit.programs.program import TracedProgram
from exportkit.programs.search import export_program
from exportkit.programs.strategies import Attempt
from exportkit.running.compare import outputs_close
from exportkit.running.eager import run_eager
from exportkit.trees import Tree, flatten, is_cache_class, make_dynamic_cache

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


def genai_obstacle(traced: TracedProgram, inputs: Mapping[str, str], parts: Collection[str]) -> str | None:
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
        return "the caches hold a sliding window, but onnxruntime-genai keeps every token"
    if missing:
        return f"the graph has no input {missing[0]!r}"
    if not past or any(name not in outputs for name in ("logits", *wanted)):
        return "the graph does not return logits and the keys and values of each layer"
    if positions is not None and len(positions.sizes) != 2:
        return f"position_ids have rank {len(positions.sizes)}"
    if len({tuple(map(str, leaf.sizes)) for leaf in past.values()}) > 1:
        return "its layers have caches of different shapes"
    return "the model's config does not define max_position_embeddings" if _context(traced) is None else None


def genai_config(traced: TracedProgram, inputs: Mapping[str, str], filename: str) -> dict[str, Any]:
    """Returns the configuration for a graph for which `genai_obstacle` returns None.

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
    """The ids of the BOS, EOS and padding tokens, as `generate` uses them."""
    source = getattr(traced.model, "generation_config", None) or _text_config(traced)
    return {name: value for name in _TOKENS if (value := getattr(source, name, None)) is not None}


def for_runtime(exported: ExportedModel, runtime: Runtime | None) -> ExportedModel:
    """Returns an export that a runtime can run: exported again with other caches if it needs them.

    Args:
        exported: The export.
        runtime: The runtime, or None.

    Raises:
        InvalidRequestError: if the runtime cannot run the model, or is unknown.
    """
    if runtime not in (None, *get_args(Runtime)):
        raise InvalidRequestError(
            "Unsupported runtime.",
            where="runtime",
            expected=", ".join(map(repr, get_args(Runtime))),
            got=repr(runtime),
        )
    if runtime != "genai":
        return exported
    if exported.split is not None:
        raise InvalidRequestError("This runtime needs a single graph.", where=repr(exported), got=exported.split.text)
    traced = exported.traced
    inputs = dict(zip(input_names(traced.input_paths), traced.input_paths, strict=True))
    if window_limits(traced) and is_causal_decoder(traced) and not foreign_inputs(inputs):
        traced, attempts = with_full_caches(traced)
        exported = replace(exported, programs={"": traced}, attempts=(*exported.attempts, *attempts))
        inputs = dict(zip(input_names(traced.input_paths), traced.input_paths, strict=True))
    obstacle = genai_obstacle(traced, inputs, exported.parts)
    if obstacle is not None:
        raise InvalidRequestError("onnxruntime-genai cannot run this model.", where=repr(exported), got=obstacle)
    return exported


def write_client_files(exported: ExportedModel, contract: Contract, folder: Path) -> Finding | None:
    """Writes the configuration files, and returns what clients should know.

    Args:
        exported: The export.
        contract: The graph; None of several graphs is configured for a runtime.
        folder: Where to write.
    """
    write_configs(exported.model, folder)
    if exported.split is not None or not is_causal_decoder(exported.traced):
        return None
    obstacle = genai_obstacle(exported.traced, contract.inputs, exported.parts)
    if obstacle is not None:
        hint = '; save(folder, runtime="genai") exports it with full caches' if window_limits(exported.traced) else ""
        text = f"no {GENAI_CONFIG}: onnxruntime-genai cannot run this model, because {obstacle}{hint}."
        return Finding("client", GENAI_CONFIG, text)
    config = genai_config(exported.traced, contract.inputs, contract.path.name)
    (folder / GENAI_CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    if "eos_token_id" in config["model"]:
        return None
    text = "the model defines no end-of-sequence token; onnxruntime-genai stops at the padding token."
    return Finding("client", GENAI_CONFIG, text)


def write_configs(model: Any, folder: Path) -> None:
    """Writes the configurations of a transformers model into the files of ``save_pretrained``."""
    config: Any = getattr(model, "config", None)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(config, "to_json_file"):
        named = copy.deepcopy(config)
        named.architectures = [type(model).__name__]
        named.to_json_file(folder / "config.json")
    if hasattr(generation, "to_json_file"):
        generation.to_json_file(folder / "generation_config.json")


def with_full_caches(traced: TracedProgram) -> tuple[TracedProgram, tuple[Attempt, ...]]:
    """Returns a model with sliding windows exported again with caches that hold every token, and what was tried.

    The attention masks alone then implement the window. What the model returns with such caches is compared with what
    it returned, for the recorded calls and at lengths before and past each window.

    Args:
        traced: A program whose caches hold a window each.

    Raises:
        ExportError: if the model returns something else with such caches.
    """
    calls = [
        _rerun(traced, call, call.outputs, f"recorded call {i}") for i, call in enumerate(traced.observation.calls)
    ]
    for sizes in _sizes_around_windows(traced):
        call = build_call(traced.plan, traced.observation, sizes)
        _rerun(traced, call, flatten(run_eager(traced.model, traced.method, call)), f"sizes {sizes}")
    observation = replace(traced.observation, calls=tuple(calls), further=())
    return export_program(traced.model, traced.method, plan_calls(observation, traced.model, traced.method))


def _rerun(traced: TracedProgram, call: Call, expected: Tree, where: str) -> Call:
    """The call with full caches and what the model returns for it, once that is confirmed to be the same."""
    trees = {name: flatten(_full(value)) for name, value in call.values().items()}
    full = replace(call, arguments=trees, cached_tokens=None)
    outputs = flatten(run_eager(traced.model, traced.method, full))
    if not outputs_close(expected.tensors(), _cut(outputs, expected)):
        raise ExportError(
            "With caches that hold every token, the model does not return what it returns with sliding windows.",
            where=where,
            hint='save without runtime="genai": the caches then hold what the model keeps.',
        )
    return replace(full, outputs=outputs)


def _full(value: Any) -> Any:
    """A cache whose layers hold every token; tokens before a window are never read, so they are zeros."""
    if not is_cache_class(type(value)):
        return value
    pairs = [
        (_padded(layer, layer.keys), _padded(layer, layer.values))
        for layer in value.layers
        if isinstance(layer.keys, torch.Tensor)
    ]
    return make_dynamic_cache(pairs)


def _padded(layer: Any, states: torch.Tensor) -> torch.Tensor:
    gone = getattr(layer, "cumulative_length", states.shape[2]) - states.shape[2]
    return torch.nn.functional.pad(states, (0, 0, gone, 0)) if gone > 0 else states


def _cut(outputs: Tree, expected: Tree) -> dict[str, torch.Tensor]:
    """The outputs, with only as many of the last tokens in each cache as expected."""
    found = outputs.tensors()
    for path, growth in expected.growing.items():
        length = expected.tensors()[path].shape[growth.axis]
        whole = found[path]
        found[path] = whole.narrow(growth.axis, whole.shape[growth.axis] - length, length)
    return found


def _sizes_around_windows(traced: TracedProgram) -> list[dict[str, int]]:
    """Sizes of the variables with fewer tokens in the cache than each window holds, and with more.

    If every layer has a window, these sizes add nothing; then the recorded calls show it, if they are long enough.
    """
    past = traced.plan.with_role("past")
    if past is None:
        return []
    limits = sorted(window_limits(traced))
    lengths = [length for limit in limits for length in (limit - 1, limit, limit + 3)]
    most = max(lengths, default=0) if past.maximum is None else past.maximum
    return [{**traced.sizes, past.name: length} for length in lengths if length <= most]
