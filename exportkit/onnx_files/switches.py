"""One graph that stores each matrix in every way at once, and is told at each call which of them to use.

With it, any choice of quantised layers is measured without writing a graph for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from exportkit.onnx_files.quantised import BITS, Layer, Quantisation, quantise
from exportkit.running.session import Session

if TYPE_CHECKING:
    import onnx


class SwitchedGraph:
    """A graph whose layers can be switched between precisions.

    Args:
        model: The graph, as `read_quantisable` returns it; it is left as it is.
        layers: Its matrices.
        request: How they are quantised.
        ways: For each layer, by the name of its node, what it can be stored in besides its own dtype.
        folder: An empty folder, which has to stay as long as the graph.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        layers: Sequence[Layer],
        request: Quantisation,
        ways: Mapping[str, Sequence[str]],
        folder: Path,
    ) -> None:
        import onnx

        whole = type(model)()
        whole.CopyFrom(model)
        self._switches: dict[tuple[str, str], str] = {}
        for kind in BITS:
            chosen = [replace(layer, stored=kind) for layer in layers if kind in ways[layer.node]]
            if chosen:
                self._add(whole, model, chosen, replace(request, weights=kind, embedding=False), kind)
        onnx.save(whole, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data")
        self._session = Session(folder / "model.onnx")

    def _add(
        self, whole: onnx.ModelProto, model: onnx.ModelProto, chosen: Sequence[Layer], request: Quantisation, kind: str
    ) -> None:
        """Adds the nodes of a quantised copy beside those of the graph, and chooses between their outputs."""
        import onnx

        copy = type(model)()
        copy.CopyFrom(model)
        quantise(copy, chosen, replace(request, embedding=any(layer.operator == "Gather" for layer in chosen)))
        known = {tensor.name for tensor in model.graph.initializer}
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
        del whole.graph.node[:]
        whole.graph.node.extend(nodes)

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
