"""Where a graph begins to differ from its model: stage, module, line and node, for faults in a program and in ONNX."""

import copy
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import exportkit
from exportkit.divergence.locate import locate_divergence
from exportkit.divergence.locate_call import locate_outputs
from exportkit.errors import InvalidRequestError, InvalidTypeError

pytestmark = pytest.mark.runtime

AFTER, BEFORE, EXPORT = "ONNX after optimisation", "ONNX before optimisation", "torch.export"


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down, self.act = Norm(), nn.Linear(8, 16), nn.Linear(16, 8), nn.SiLU()

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    """Embeds tokens, and goes through two layers, the second of them twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(30, 8), nn.Linear(8, 30, bias=False)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, ids):
        x = self.layers[0](self.embed(ids))
        return self.head(self.layers[1](self.layers[1](x))), x


IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model, its program, and its ONNX form."""
    model = Model().eval()
    program = torch.export.export(model, (IDS,))
    return model, program, torch.onnx.export(program, (), verbose=False).model_proto


def with_changed_weight(proto, module, change):
    """The ONNX model with the weight of a module changed, as it is in a node of that module."""
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    weights = {value.name: value for value in changed.graph.initializer}
    nodes = [
        node
        for node in changed.graph.node
        if any(f"'{module}', '" in entry.value for entry in node.metadata_props if entry.key.endswith("name_scopes"))
    ]
    names = [name for node in nodes for name in node.input if name in weights and weights[name].dims]
    weight = weights[max(names, key=lambda name: len(weights[name].dims))]
    array = change(onnx.numpy_helper.to_array(weight).copy())
    weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
    return changed


def scaled(array):
    return array * np.float32(1.02)


def permuted(array):
    return np.roll(array, 1, axis=-1)


def with_one_element(array):
    array.reshape(-1)[array.size // 3] += 0.1
    return array


@pytest.mark.parametrize(
    ("module", "operator", "change"),
    [
        ("embed", "Gather", scaled),
        ("layers.0.norm", "Mul", with_one_element),
        ("layers.0.up", "Gemm|MatMul|Add", permuted),
        ("layers.1.down", "Gemm|MatMul|Add", scaled),
        ("head", "MatMul", with_one_element),
    ],
)
def test_a_changed_weight_of_the_onnx_model_is_located(exported, module, operator, change):
    model, program, proto = exported

    found = locate_divergence(model, with_changed_weight(proto, module, change), (IDS,), program=program)

    assert (found.stage, found.module) == (AFTER, module)
    assert found.operator in operator.split("|")
    assert Path(found.line.partition(":")[0]).name == "test_locate.py"
    assert [(stage.name, stage.outcome) for stage in found.stages] == [
        (EXPORT, "agrees"),
        (BEFORE, "agrees"),
        (AFTER, "diverges"),
    ]
    assert found.stages[1].note.startswith("weight ")
    assert found.suspects[0].module == module


def test_a_sound_export_agrees_at_every_stage(exported):
    model, program, proto = exported

    found = locate_divergence(model, proto, (IDS,), program=program)

    assert not found.diverges
    assert str(found).splitlines()[0] == "No stage diverges."
    assert [stage.outcome for stage in found.stages] == ["not checked", "not checked", "agrees", "agrees"]


def test_a_program_that_differs_is_located(exported):
    other = Model().eval()
    program = torch.export.export(other, (IDS,))
    other.layers[0].norm.weight.data[2] += 0.1

    found = locate_divergence(exported[0], program, IDS)

    assert (found.stage, found.module, found.class_name) == (EXPORT, "layers.0.norm", "Norm")
    assert found.index[-1] == 2
    assert "self.weight * x" in found.line


def test_a_program_that_differs_comes_before_its_onnx_model(exported):
    other = Model().eval()
    program = torch.export.export(other, (IDS,))
    other.layers[0].up.weight.data *= 1.1
    wrong = with_changed_weight(exported[2], "layers.0.up", lambda array: array * np.float32(1.1))

    found = locate_divergence(exported[0], wrong, (IDS,), program=program)

    assert (found.stage, found.module) == (EXPORT, "layers.0.up")


def test_a_model_before_optimisation_that_differs_comes_before_the_optimised_one(exported):
    model, program, proto = exported
    wrong = with_changed_weight(proto, "head", scaled)

    found = locate_divergence(model, wrong, (IDS,), program=program, before=wrong)

    assert (found.stage, found.module) == (BEFORE, "head")


def test_without_the_program_the_module_is_named_as_well(exported):
    found = locate_divergence(exported[0], with_changed_weight(exported[2], "layers.0.down", scaled), {"ids": IDS})

    assert (found.stage, found.module) == (AFTER, "layers.0.down")
    assert found.stages[0].note == "the program is not known"


class Fused(nn.Module):
    """A convolution and a norm, which optimisation makes one node of the norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)))


def test_modules_that_optimisation_makes_one_are_no_difference():
    model, x = Fused().eval(), torch.randn(2, 4, 8, 8)
    program = torch.export.export(model, (x,))
    proto = torch.onnx.export(program, (), verbose=False).model_proto

    assert not locate_divergence(model, proto, (x,), program=program).diverges
    found = locate_divergence(model, with_changed_weight(proto, "norm", scaled), (x,), program=program)
    assert (found.stage, found.module) == (AFTER, "norm")


def test_a_constant_of_a_node_names_that_node(exported):
    model, program, proto = exported
    wrong = copy.deepcopy(proto)
    epsilon = next(v for v in wrong.graph.initializer if np.allclose(onnx.numpy_helper.to_array(v), 1e-3))
    epsilon.CopyFrom(onnx.numpy_helper.from_array(np.float32(0.1), epsilon.name))

    found = locate_divergence(model, wrong, (IDS,), program=program)

    assert (found.stage, found.module, found.operator) == (AFTER, "layers.0.norm", "Add")
    assert found.stages[1].note == "layers.0.norm by itself"
    assert "torch.rsqrt" in found.line


def test_the_model_is_left_as_it_was(exported):
    model, program, proto = exported
    before = {name: dict(vars(module)) for name, module in model.named_modules()}

    locate_divergence(model, proto, (IDS,), program=program)

    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert [value.name for value in proto.graph.output] == [value.name for value in exported[2].graph.output]
    assert len(proto.graph.output) == 2


def test_nodes_without_modules_are_refused(exported):
    bare = copy.deepcopy(exported[2])
    for node in bare.graph.node:
        del node.metadata_props[:]

    with pytest.raises(InvalidRequestError) as error:
        locate_divergence(exported[0], bare, (IDS,))

    assert str(error.value) == (
        "The nodes of this ONNX model do not say which modules they come from.\n"
        "  expected: pkg.torch.onnx.name_scopes in the metadata of nodes\n"
        "  hint: export it with torch.onnx.export(..., dynamo=True), and keep the metadata."
    )


def test_a_graph_of_another_model_is_refused(exported):
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Model().eval()

        def forward(self, ids):
            return self.inner(ids)

    with pytest.raises(InvalidRequestError, match="no values of the model's modules"):
        locate_divergence(Around(), exported[1], (IDS,))


def test_what_is_no_graph_and_no_arguments_is_refused(exported, tmp_path):
    with pytest.raises(InvalidTypeError, match="Not an ONNX model"):
        locate_divergence(exported[0], 3, (IDS,))
    with pytest.raises(InvalidTypeError, match="Not arguments of a model"):
        locate_divergence(exported[0], exported[1], 3)
    with pytest.raises(InvalidRequestError, match="ONNX model cannot be read"):
        locate_divergence(exported[0], tmp_path / "missing.onnx", (IDS,))


def test_where_onnxruntime_stops_is_named(exported):
    model, program, _ = exported
    small = Model().eval()
    small.embed.weight = nn.Parameter(small.embed.weight[:10])
    refusing = torch.onnx.export(torch.export.export(small, (IDS % 10,)), (), verbose=False).model_proto

    found = locate_divergence(model, refusing, (IDS,), program=program)

    assert (found.stage, found.module, found.operator) == ("onnxruntime", "embed", "Gather")
    assert "onnxruntime stopped" in found.reason


def test_wrong_outputs_alone_narrow_it_down(exported):
    model, _, proto = exported
    names = [value.name for value in proto.graph.output]
    with torch.no_grad():
        expected = dict(zip(names, model(IDS), strict=True))
    inputs = {proto.graph.input[0].name: IDS}

    found = locate_outputs(with_changed_weight(proto, "layers.1.up", scaled), inputs, expected)

    assert found.tensor == names[0]
    assert "layers.1" in found.reason
    assert "layers.0" not in found.reason
    assert not locate_outputs(proto, inputs, expected).diverges


def test_json_is_valid(exported):
    found = locate_divergence(exported[0], with_changed_weight(exported[2], "head", scaled), (IDS,))

    assert json.loads(found.as_json())["module"] == "head"


class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.score = nn.Sequential(nn.Linear(5, 7), nn.Tanh()), nn.Linear(7, 2)

    def forward(self, x):
        return self.score(self.body(x))


def test_a_failed_proof_offers_to_locate(tmp_path):
    model, observer = Scored().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model(torch.randn(3, 5))
        model(torch.randn(4, 5))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().locate() is None
    proto = onnx.load(onnx_model.path)
    onnx.save(with_changed_weight(proto, "body.0", scaled), onnx_model.path)
    onnx_model.graph._session = None

    report = onnx_model.verify()

    assert not report.ok
    assert "note: locate() names the module, line and node where the difference begins" in str(report).splitlines()
    assert report.locate().module == "body.0"
    assert "locator" not in json.loads(report.to_json())["rows"][0]
    proven = next((row for row in report.rows if row.status not in ("differs", "refused")), None)
    if proven is not None:
        with pytest.raises(InvalidRequestError, match="no difference to locate"):
            proven.locate()


class Routed(nn.Module):
    """Gives each row to the two experts with the best scores; all scores are equal before it is trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.router, self.experts = Norm(), Router(), Experts()

    def forward(self, x):
        x = self.norm(x)
        return x + self.experts(x, self.router(x))


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 6, bias=False)
        nn.init.zeros_(self.gate.weight)

    def forward(self, x):
        return torch.topk(self.gate(x).sigmoid(), 2, dim=-1)[1]


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))

    def forward(self, x, chosen):
        return x * self.weight[chosen].sum(-2)


def test_a_choice_among_equal_values_is_named():
    model, x = Routed().eval(), torch.randn(3, 8)
    program = torch.export.export(model, (x,))
    proto = torch.onnx.export(program, (), verbose=False).model_proto

    found = locate_divergence(model, proto, (x,), program=program)

    assert (found.stage, found.module, found.operator) == (BEFORE, "router", "TopK")
    assert "torch.topk" in found.line
    assert str(found).splitlines()[3] == (
        "  reason  it chooses among equal values: torch leaves open which of them top-k takes, ONNX takes the first"
    )


class Long(nn.Module):
    """Returns the last of what it computes, or all of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x, last=0):
        x = self.body(x)
        return {"x": x, "scores": self.head(x[:, -last:] if last else x)}


def test_an_output_that_the_graph_has_not_is_named():
    model, x = Long().eval(), torch.randn(2, 4, 8)
    program = torch.export.export(model, (x,), {"last": 1})
    proto = torch.onnx.export(program, (), verbose=False).model_proto

    found = locate_divergence(model, proto, (x,))

    assert not found.diverges
    assert str(found).splitlines()[0] == "No stage diverges, but there is nothing to compare scores with."
    assert found.stages[-1].note == "outputs.scores: no value of the graph has its shape (2, 4, 5)"
    found = locate_divergence(model, proto, (x,), wrong=["scores"])
    assert (found.stage, found.module) == (AFTER, "head")
    assert str(found).splitlines()[1:3] == [
        "  tensor  outputs",
        "  reason  no value of the graph has its shape (2, 4, 5)",
    ]


def test_constants_of_the_graph_are_given_to_the_model(tmp_path):
    model, observer = Long().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model(torch.randn(2, 4, 8), last=1)
        model(torch.randn(3, 5, 8), last=1)
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")

    found = locate_divergence(model, onnx_model, (torch.randn(2, 6, 8),))

    assert str(found).splitlines()[0] == "No stage diverges."
    assert not found.unmatched


class Sorting(nn.Module):
    """Has one half of its rows inside of a module gated by the other, in an order of its own when it is not traced."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.act, self.head = nn.Linear(8, 12), nn.SiLU(), nn.Linear(6, 3)
        self.rows = Rows(self.up, self.act)

    def forward(self, x):
        return self.head(self.rows(x))


class Rows(nn.Module):
    def __init__(self, up, act):
        super().__init__()
        self.up, self.act = up, act

    def forward(self, x):
        order = torch.arange(len(x)) if torch.compiler.is_exporting() else torch.arange(len(x)).flip(0)
        gate, rest = self.up(x[order]).chunk(2, -1)
        return (self.act(gate) * rest)[order]


def test_rows_in_another_order_inside_of_a_module_are_no_difference():
    model, x = Sorting().eval(), torch.randn(5, 8)
    program = torch.export.export(model, (x,))
    proto = torch.onnx.export(program, (), verbose=False).model_proto

    assert not locate_divergence(model, proto, (x,), program=program).diverges
    found = locate_divergence(model, with_changed_weight(proto, "head", scaled), (x,), program=program)
    assert (found.stage, found.module) == (AFTER, "head")


class Padded(nn.Module):
    """Has two rows for each token in a module inside of another; what it makes of padding depends on how it runs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.both, self.head = Both(), nn.Linear(8, 3)

    def forward(self, x, attention_mask):
        hidden = 5.0 if torch.compiler.is_exporting() else 0.0
        return self.head(self.both(x, hidden * (1 - attention_mask)[..., None]))


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, x, padding):
        rows = (x + padding).reshape(-1, 8)
        return self.act(torch.cat([rows, -rows])).reshape(2, *x.shape).sum(0)


def test_rows_of_padding_are_no_difference():
    given = {"x": torch.randn(2, 4, 8), "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])}
    model = Padded().eval()
    program = torch.export.export(model, (), given)
    proto = torch.onnx.export(program, (), verbose=False).model_proto

    assert not locate_divergence(model, proto, given, program=program).diverges
    found = locate_divergence(model, with_changed_weight(proto, "head", scaled), given, program=program)
    assert (found.stage, found.module) == (AFTER, "head")
