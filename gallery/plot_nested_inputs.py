"""
A model of your own with nested inputs
======================================

What if the inputs are dicts, lists and dataclasses, and the outputs are nested as well?
"""

from dataclasses import dataclass
from tempfile import TemporaryDirectory

import torch

import exportkit


@dataclass
class Graph:
    nodes: torch.Tensor  # (nodes, 8)
    edges: torch.Tensor  # (2, edges), indices of nodes


# Lists, tuples, dicts and named tuples are built in. A dataclass is registered once, before the model runs.
torch.export.register_dataclass(Graph, serialized_type_name="Graph")


class Messages(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.score = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)

    def forward(self, graph, options, weights=None):
        source, target = graph.edges
        sent = self.layer(graph.nodes)[source] * (1 if weights is None else weights.unsqueeze(-1))
        states = graph.nodes.index_add(0, target, sent).relu()
        return {"scores": self.score(states[options["asked"][0]]) / options["temperature"], "states": [states]}


def inputs(nodes, edges, asked):
    options = {"asked": [torch.randint(nodes, (asked,))], "temperature": 2.0}
    return Graph(torch.randn(nodes, 8), torch.randint(nodes, (2, edges))), options


# %%
# There are three calls, the last one with weights. Tensors are identified by their paths.

model, observer = Messages().eval(), exportkit.InputObserver()
with observer(model):
    model(*inputs(5, 9, 2))
    model(*inputs(6, 12, 4))
    model(*inputs(9, 8, 3), weights=torch.rand(8))
print(observer.plan())

# %%
# The graph is called like the model, and returns the same structure. It serves calls with and without weights.

with TemporaryDirectory() as folder:
    onnx_model = exportkit.export(model, observer).to_onnx(f"{folder}/messages.onnx")
    print(onnx_model.verify())
    print(exportkit.string_type(onnx_model(*inputs(20, 50, 1)), with_shape=True))
