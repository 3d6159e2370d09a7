"""From a call that is not proven to the module where it begins to differ: in comes the call, out comes a locator."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from exportkit.arguments import Arguments, as_simplified
from exportkit.export import Exported, OnnxModel
from exportkit.tracing import Located, locate_divergence, locate_outputs


def locator_of(
    onnx_model: OnnxModel, arguments: Arguments, expected: Mapping[str, torch.Tensor]
) -> Callable[[torch.nn.Module | None], Located]:
    """Returns what locates the difference of one call, given the model in PyTorch, or what is known without it.

    Args:
        onnx_model: The graph.
        arguments: The call.
        expected: What the model returned, by path.
    """

    def locate(model: torch.nn.Module | None) -> Located:
        exported = onnx_model.exported
        if model is None and isinstance(exported, Exported):
            model = exported.model
        args, kwargs = arguments.call()
        if model is not None:
            return locate_divergence(model, onnx_model, (tuple(args), dict(kwargs)), method=exported.method)
        tensors = as_simplified(expected, exported.joined_outputs, ())
        wanted = {name: tensors[path] for name, path in onnx_model.file.outputs.items() if path in tensors}
        return locate_outputs(onnx_model.path, onnx_model.feeds(*args, **kwargs), wanted)

    return locate
