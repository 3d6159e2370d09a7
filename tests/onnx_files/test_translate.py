"""The ONNX file computes what the program does, small numbers included."""

import torch

import exportkit


class SmallNumbers(torch.nn.Module):
    """Adds an epsilon that is nearly zero, and multiplies by what is nearly one."""

    def forward(self, x):
        return {"norm": x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-8), "scaled": x.double() * (1 + 1e-6)}


def test_an_epsilon_is_not_taken_for_zero_and_a_factor_not_for_one(tmp_path):
    model, observer = SmallNumbers(), exportkit.InputObserver()
    with observer(model):
        model(torch.randn(2, 4))
        model(torch.randn(3, 4))
    onnx = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")

    x = torch.randn(5, 4)
    x[0] = 0
    expected, got = model(x), onnx(x)
    torch.testing.assert_close(got["norm"], expected["norm"])
    torch.testing.assert_close(got["scaled"], expected["scaled"], rtol=2e-7, atol=0)  # torch.onnx holds it as float32


def test_the_optimiser_is_afterwards_as_it_was(tmp_path):
    from exportkit._torch_compat.onnx import exact_no_ops

    constants = [constant for constant, _ in exact_no_ops()]
    assert constants
    before = [dict(vars(constant)) for constant in constants]
    model, observer = torch.nn.Linear(4, 2), exportkit.InputObserver()
    with observer(model):
        model(torch.randn(2, 4))
    exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert [dict(vars(constant)) for constant in constants] == before


class Quantile(torch.nn.Module):
    """Keeps what is above a quantile of a normal distribution, which is a constant."""

    def forward(self, x):
        level = torch.distributions.normal.Normal(0, 1).icdf(torch.tensor(0.95))
        return torch.relu(x - x.mean(-1, keepdim=True) - level * x.std(-1, keepdim=True, unbiased=False))


def test_a_number_that_depends_on_constants_alone_needs_no_operator(tmp_path):
    model, observer = Quantile(), exportkit.InputObserver()
    with observer(model):
        model(torch.randn(2, 50))
        model(torch.randn(3, 50))
    exported = exportkit.export(model, observer)
    graph = str(exported.program.graph)
    onnx = exported.to_onnx(tmp_path / "model.onnx")
    x = torch.randn(5, 50)
    torch.testing.assert_close(onnx(x), model(x))
    assert model(x).count_nonzero()
    assert str(exported.program.graph) == graph


def test_a_rule_for_two_slices_of_one_tensor_is_only_asked_about_such_slices(monkeypatch):
    import onnx_ir as ir

    from exportkit._torch_compat.onnx import quick_matches

    ((matcher, _),) = quick_matches()
    asked = []
    monkeypatch.setattr(type(matcher), "match", lambda _self, _model, _graph, node, **_: asked.append(node))
    ((_, attributes),) = quick_matches()
    x = ir.val("x")
    alone = [ir.node("Slice", [ir.node("Sin", [x]).outputs[0]]) for _ in range(3)]
    pair = [ir.node("Slice", [x]) for _ in range(2)]
    for node in (*alone, *pair, ir.node("Cos", [x])):
        attributes["match"](None, None, node)
    assert asked == pair
