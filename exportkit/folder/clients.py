"""Files beside the graphs that clients read, and exports that a given client can run.

These are ``config.json`` and ``generation_config.json`` of a transformers model and, for causal language models,
``genai_config.json`` of onnxruntime-genai. A runtime that allocates caches itself, all of one length, cannot run
sliding windows; such a model is exported again with caches that hold every token.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from exportkit.arguments.build import build_call
from exportkit.calls.call import Call
from exportkit.errors import ExportError, InvalidRequestError
from exportkit.folder.genai import (
    GENAI_CONFIG,
    foreign_inputs,
    genai_config,
    genai_obstacle,
    is_causal_decoder,
    window_limits,
)
from exportkit.onnx_files.contract import Contract, Runtime
from exportkit.onnx_files.translate import input_names
from exportkit.plan.leaves import Finding
from exportkit.probing.planning import plan_calls
from exportkit.programs.exported import ExportedModel
from exportkit.programs.program import TracedProgram
from exportkit.programs.strategies import Attempt, export_program
from exportkit.running.compare import outputs_close
from exportkit.running.eager import run_eager
from exportkit.trees import Tree, flatten, is_cache_class, make_dynamic_cache


def for_runtime(exported: ExportedModel, runtime: Runtime | None) -> ExportedModel:
    """Returns an export that a runtime can run: exported again with other caches if it needs them.

    Args:
        exported: The export.
        runtime: The runtime; None for none in particular.

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
    text = "the model names no token that ends a text; onnxruntime-genai ends it at the padding token."
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

    The attention masks alone do the sliding then. What the model returns with such caches is compared with what it
    returned, for the recorded calls and at lengths before and past each window.

    Args:
        traced: A program whose caches hold a window each.

    Raises:
        ExportError: if the model returns something else with such caches.
    """
    calls = [_full_call(traced, index) for index in range(len(traced.observation.calls))]
    for sizes in _sizes_around_windows(traced):
        call = build_call(traced.plan, traced.observation, sizes)
        _rerun(traced, call, flatten(run_eager(traced.model, traced.method, call)), f"sizes {sizes}")
    observation = replace(traced.observation, calls=tuple(calls), further=())
    return export_program(traced.model, traced.method, plan_calls(observation, traced.model, traced.method))


def _full_call(traced: TracedProgram, index: int) -> Call:
    call = traced.observation.calls[index]
    return _rerun(traced, call, call.outputs, f"recorded call {index}")


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
    pairs = [(_padded(layer, layer.keys), _padded(layer, layer.values)) for layer in value.layers if _is_filled(layer)]
    return make_dynamic_cache(pairs)


def _is_filled(layer: Any) -> bool:
    return isinstance(layer.keys, torch.Tensor)


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
