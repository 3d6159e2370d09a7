"""Names of the files of a folder, and of the inputs in them, as the clients of each kind of model know them.

In comes an export; out goes a `Layout`. Encoders and decoders keep the names of the plan in ``model.onnx``. An
encoder-decoder model whose encoder was exported too gets those of optimum's ORTModelForSeq2SeqLM:
https://huggingface.co/docs/optimum-onnx. There a decoder without an input ``use_cache_branch`` is one graph for the
first call, with caches of length 0, and for later ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from exportkit.onnx_files.names import input_names
from exportkit.onnx_files.translate import OnnxFile

if TYPE_CHECKING:
    from exportkit.programs.exported import Exported

# What transformers calls the decoder's inputs, and optimum.
_DECODER = {
    "decoder_input_ids": "input_ids",
    "decoder_attention_mask": "attention_mask",
    "attention_mask": "encoder_attention_mask",
}
_CACHE = re.compile(r"\.(?P<layer>\d+)\.(?P<half>decoder|encoder)\.(?P<state>key|value)$")


@dataclass(frozen=True)
class Layout:
    """How the graphs of a folder are called.

    Attributes:
        file: Name of the model's own file.
        parts: Names of the files of its parts.
        renamed: Names of inputs by the path of their leaf, where they differ from those of the plan.
    """

    file: str = "model.onnx"
    parts: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)


def layout_of(exported: Exported) -> Layout:
    """Returns the names for an export."""
    encoders = [name for name, edges in exported.edges.items() if len(edges) == 1]
    names = input_names(exported.captured.input_paths)
    if len(encoders) != 1 or not any((match := _CACHE.search(name)) and match["half"] == "encoder" for name in names):
        return Layout(parts={name: f"{name}.onnx" for name in exported.parts})
    states = exported.edges[encoders[0]][0].target
    files = {name: f"{name}.onnx" for name in exported.parts} | {encoders[0]: "encoder_model.onnx"}
    return Layout("decoder_model_merged.onnx", files, {**_DECODER, states: "encoder_hidden_states"})


def layout_of_program(exported: Exported, name: str) -> Layout:
    """Returns the names for one of several programs of a model, which no client knows."""
    return Layout(f"model.{name}.onnx", {part: f"model.{name}.{part}.onnx" for part in exported.parts})


def rename_inputs(file: OnnxFile, renamed: Mapping[str, str]) -> OnnxFile:
    """Gives inputs of an ONNX file other names, and sorts caches by layer, as optimum fills them by position.

    Args:
        file: The file, which is written again; its weights are not touched.
        renamed: New names by path.
    """
    import onnx_ir

    names = {name: renamed.get(path, name) for name, path in file.inputs.items()}
    if not any(path in renamed for path in file.inputs.values()):
        return file
    model = onnx_ir.load(file.path)
    values = list(model.graph.inputs)
    for value in values:
        value.name = names[value.name or ""]
    order = sorted(names.values(), key=_position)
    by_name = {value.name: value for value in values}
    model.graph.inputs.clear()
    model.graph.inputs.extend(by_name[name] for name in order)
    onnx_ir.save(model, file.path)
    paths = {names[name]: path for name, path in file.inputs.items()}
    return replace(file, inputs={name: paths[name] for name in order})


def _position(name: str) -> tuple[int, str, str]:
    match = _CACHE.search(name)
    return (-1, "", "") if match is None else (int(match["layer"]), match["half"], match["state"])
