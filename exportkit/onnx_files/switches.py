"""Graphs that are told at each call what each layer is stored in, so that choices of quantised layers are measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from exportkit.onnx_files.quantised import BITS, Quantisation, WeightMatrix
from exportkit.onnx_files.quantisers import quantise, write
from exportkit.running.compare import Tensors
from exportkit.running.protos import copied, set_nodes, weights_of
from exportkit.running.session import Session

if TYPE_CHECKING:
    import onnx


class SwitchedGraph:
    """A graph that stores each matrix in every form at once, so that no choice takes another graph.

    Args:
        model: The graph, as `read_quantisable` returns it; it is left as it is.
        layers: Its matrices.
        request: How they are quantised.
        forms: For each layer, by the name of its node, what it can be stored in, apart from its own dtype.
        folder: An empty folder, which has to stay as long as the graph.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        layers: Sequence[WeightMatrix],
        request: Quantisation,
        forms: Mapping[str, Sequence[str]],
        folder: Path,
    ) -> None:
        whole = copied(model)
        self._switches: dict[tuple[str, str], str] = {}
        for kind in BITS:
            chosen = [replace(layer, stored=kind) for layer in layers if kind in forms[layer.node]]
            if chosen:
                self._add(whole, model, chosen, replace(request, weights=kind, embedding=False), kind)
        write(whole, folder / "model.onnx")
        self._session = Session(folder / "model.onnx")

    def _add(
        self,
        whole: onnx.ModelProto,
        model: onnx.ModelProto,
        chosen: Sequence[WeightMatrix],
        request: Quantisation,
        kind: str,
    ) -> None:
        """Adds the nodes of a quantised copy beside those of the graph, and chooses between their outputs."""
        import onnx

        copy = copied(model)
        quantise(copy, chosen, replace(request, embedding=any(layer.operator == "Gather" for layer in chosen)))
        known = weights_of(model.graph)
        whole.graph.initializer.extend([tensor for tensor in copy.graph.initializer if tensor.name not in known])
        added = {node.output[0]: node for node in copy.graph.node if node.domain == "com.microsoft"}
        outputs = {node.output[0]: node for node in whole.graph.node}
        nodes = list(whole.graph.node)
        for layer in chosen:
            (made,) = next(node.output for node in model.graph.node if node.name == layer.node)
            node, last = added[made], outputs[made]  # last is the choice that was added for another precision
            node.output[0], last.output[0] = f"{made}/{kind}", f"{made}/before/{kind}"
            switch = self._switches[layer.node, kind] = f"{layer.node}/{kind}"
            whole.graph.input.append(onnx.helper.make_tensor_value_info(switch, onnx.TensorProto.BOOL, []))
            choice = onnx.helper.make_node("Where", [switch, node.output[0], last.output[0]], [made])
            place = next(number for number, other in enumerate(nodes) if other is last)
            nodes[place + 1 : place + 1] = [node, choice]
        imports = {item.domain: item.version for item in copy.opset_import}
        del whole.opset_import[:]
        whole.opset_import.extend([onnx.helper.make_opsetid(domain, version) for domain, version in imports.items()])
        whole.ir_version = copy.ir_version
        set_nodes(whole.graph, nodes)

    def run(self, feeds: Mapping[str, torch.Tensor], stored: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Returns the outputs by name.

        Args:
            feeds: Tensors by name of the graph's input.
            stored: What layers are stored in, by the names of their nodes; all others have the dtype of the graph.

        Raises:
            RuntimeFailure: if onnxruntime refuses the call.
        """
        switches = {name: torch.tensor(stored.get(node) == kind) for (node, kind), name in self._switches.items()}
        return self._session.run({**feeds, **switches})


class RewrittenGraph:
    """A graph whose layers can be switched between precisions, and which is written again for each choice.

    Args:
        model: The graph, as `read_quantisable` returns it; it is left as it is.
        layers: Its matrices.
        request: How they are quantised.
        calibration: Tensors by name of the graph's input, for each call by which activations are calibrated.
        folder: An empty folder, which has to stay as long as the graph.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        layers: Sequence[WeightMatrix],
        request: Quantisation,
        calibration: Sequence[Tensors],
        folder: Path,
    ) -> None:
        self._model, self._layers, self._request, self._calibration = model, layers, request, calibration
        self._folder = folder
        self._opened: tuple[Mapping[str, str], Session] | None = None

    def run(self, feeds: Mapping[str, torch.Tensor], stored: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Returns the outputs by name; see `SwitchedGraph.run`."""
        if self._opened is None or self._opened[0] != stored:
            copy = copied(self._model)
            layers = [replace(layer, stored=stored.get(layer.node, layer.dtype)) for layer in self._layers]
            path = self._folder / "model.onnx"
            write(quantise(copy, layers, self._request, self._calibration), path)
            self._opened = {**stored}, Session(path)
        return self._opened[1].run(feeds)
