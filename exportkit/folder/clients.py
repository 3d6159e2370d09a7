"""Files beside the graphs that clients read: the configuration of the model, and that of a runtime.

In comes an export; out go ``config.json`` and ``generation_config.json`` of a transformers model, and for causal
language models ``genai_config.json``. Why a client cannot use a graph is a finding of the export.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from exportkit.errors import InvalidRequestError
from exportkit.folder.genai import (
    GENAI_CONFIG,
    foreign_inputs,
    genai_config,
    genai_obstacle,
    is_causal_decoder,
    window_limits,
)
from exportkit.onnx_files.names import input_names
from exportkit.onnx_files.translate import OnnxFile
from exportkit.plan.leaves import Finding
from exportkit.programs.exported import Exported
from exportkit.programs.full_caches import with_full_caches

Runtime = Literal["genai"]


def for_runtime(exported: Exported, runtime: Runtime | None) -> Exported:
    """Returns the export that a runtime can run: exported again with other caches where it needs them.

    Raises:
        InvalidRequestError: if the runtime cannot run the model, or is unknown.
    """
    if runtime is None:
        return exported
    if runtime not in get_args(Runtime):
        raise InvalidRequestError(
            "There is nothing special to do for this runtime.",
            where="runtime",
            expected=", ".join(map(repr, get_args(Runtime))),
            got=repr(runtime),
        )
    if window_limits(exported) and is_causal_decoder(exported) and not foreign_inputs(_inputs(exported)):
        exported = with_full_caches(exported)
    obstacle = genai_obstacle(exported, _inputs(exported))
    if obstacle is not None:
        raise InvalidRequestError("onnxruntime-genai cannot run this model.", where=repr(exported), got=obstacle)
    return exported


def _inputs(exported: Exported) -> dict[str, str]:
    paths = exported.captured.input_paths
    return dict(zip(input_names(paths), paths, strict=True))


def write_client_files(exported: Exported, file: OnnxFile, folder: Path) -> Exported:
    """Writes the configuration files, and returns the export with what clients should know among its findings."""
    write_configs(exported.model, folder)
    if not is_causal_decoder(exported):
        return exported
    obstacle = genai_obstacle(exported, file.inputs)
    if obstacle is not None:
        hint = '; save(folder, runtime="genai") exports it with full caches' if window_limits(exported) else ""
        return _with_note(exported, f"no {GENAI_CONFIG}, for onnxruntime-genai cannot run it: {obstacle}{hint}.")
    config = genai_config(exported, file.inputs, file.path.name)
    (folder / GENAI_CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    if "eos_token_id" in config["model"]:
        return exported
    text = "the model names no token that ends a text; onnxruntime-genai ends it at the padding token."
    return _with_note(exported, text)


def _with_note(exported: Exported, text: str) -> Exported:
    return replace(exported, plan=exported.plan.with_findings([Finding("client", GENAI_CONFIG, text)]))


def write_configs(model: Any, folder: Path) -> None:
    """Writes what transformers knows of its own models, in the files of ``save_pretrained``."""
    config: Any = getattr(model, "config", None)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(config, "to_json_file"):
        named = copy.deepcopy(config)
        named.architectures = [type(model).__name__]
        named.to_json_file(folder / "config.json")
    if hasattr(generation, "to_json_file"):
        generation.to_json_file(folder / "generation_config.json")
