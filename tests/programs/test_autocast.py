"""Models that use torch.autocast, and calls that are recorded under it."""

import pytest
import torch
from torch import nn

import exportkit
from exportkit.errors import ArgumentError

F = nn.functional


def autocast(**options):
    return torch.autocast("cpu", **{"dtype": torch.bfloat16, **options})


class Model(nn.Module):
    """Returns what a function makes of its layers and an input ``(batch, seq, 8)``."""

    def __init__(self, function=None):
        super().__init__()
        self.wide, self.norm, self.narrow = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.conv, self.group = nn.Conv1d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.function = function

    def forward(self, x):
        return self.narrow(self.norm(self.wide(x)).relu()) if self.function is None else self.function(self, x)


def linear(model, x):
    with autocast():
        return model.narrow(model.wide(x)).float()


def norm(model, x):
    with autocast():
        return model.norm(model.wide(x))


def group(model, x):
    with autocast():
        return model.group(model.conv(x.transpose(1, 2)))


def attention(model, x):
    with autocast():
        heads = model.wide(x)[:, None]
        return F.scaled_dot_product_attention(heads, heads, heads).float()


def nested(model, x):
    with autocast():
        wide = model.wide(x)
        with autocast(enabled=False):
            wide = model.norm(wide.float())
        return model.narrow(wide)


def decorated(model, x):
    return autocast()(lambda x: model.narrow(model.wide(x)))(x)


def off(_, x):
    with autocast(enabled=False):
        return torch.cdist(x, x)  # torch.onnx cannot translate it as it is


def with_gradients(model, x):
    with torch.enable_grad():
        return model.wide(x), torch.cdist(x, x)


def recorded(model, *modes):
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, mode in enumerate(modes, start=2):
            with mode:
                model(torch.randn(batch, batch + 3, 8))
    return observer


@pytest.mark.parametrize("function", [linear, norm, group, attention, nested, decorated, off, with_gradients])
def test_a_model_that_sets_modes_itself_is_proven(function, tmp_path):
    torch.manual_seed(0)
    model = Model(function).eval()
    exported = exportkit.export(model, recorded(model, autocast(enabled=False), autocast(enabled=False)))
    assert not [node for node in exported.program.graph.nodes if "wrap_with" in str(node.target)]
    assert exported.to_onnx(tmp_path / "model.onnx").verify().ok


def test_calls_under_autocast_are_proven_as_they_were_made(tmp_path):
    torch.manual_seed(0)
    model = Model().eval()
    exported = exportkit.export(model, recorded(model, autocast(), autocast()))
    verification = exported.save(tmp_path / "model").verify()
    assert verification.ok
    loaded = exportkit.load(tmp_path / "model")
    x = torch.randn(3, 4, 8)
    with torch.no_grad(), autocast():
        expected = model(x)
    assert loaded(x).dtype == expected.dtype == torch.bfloat16
    assert torch.allclose(loaded(x).float(), expected.float(), rtol=0.05, atol=0.05)
    assert loaded.verify(model).ok
    assert exported.programs
    assert {
        node.meta["nn_module_stack"].popitem()[1][0] for node in exported.program.graph.nodes if "linear" in node.name
    }


def test_saved_calls_know_that_they_were_made_under_autocast(tmp_path):
    model = Model().eval()
    recorded(model, autocast(), autocast(enabled=False)).observation.save(tmp_path / "calls")
    calls = exportkit.Observation.load(tmp_path / "calls").calls
    assert [call.autocast for call in calls] == [(("cpu", "bfloat16"),), ()]


def test_an_export_under_autocast_is_not_changed_by_it(tmp_path):
    model = Model().eval()
    observer = recorded(model, autocast(enabled=False), autocast(enabled=False))
    with autocast():
        graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
        assert graph.verify().ok
    assert graph(torch.randn(2, 3, 8)).dtype == torch.float32


def test_calls_with_and_without_autocast_are_not_proven_and_the_report_says_why(tmp_path):
    model = Model().eval()
    exported = exportkit.export(model, recorded(model, autocast(enabled=False), autocast()))
    verification = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert not verification.ok
    assert "call 1 was made under torch.autocast, and call 0 was not" in str(verification)


def test_a_part_in_half_precision_does_not_loosen_the_bound_of_the_others(tmp_path):
    def mostly_whole(model, x):
        with autocast():
            hardly = (x @ x.mT).float().sum((-1, -2), keepdim=True) * 0
        return model.narrow(model.wide(x)) + hardly

    torch.manual_seed(0)
    model = Model(mostly_whole).eval()
    observer = recorded(model, autocast(enabled=False), autocast(enabled=False))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    with torch.no_grad():
        model.narrow.weight *= 1.0005
    assert not graph.verify().ok


def test_the_bound_in_half_precision_does_not_hide_a_wrong_graph(tmp_path):
    torch.manual_seed(0)
    model = Model(linear).eval()
    graph = exportkit.export(model, recorded(model, autocast(), autocast())).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    with torch.no_grad():
        model.narrow.weight[3] *= 1.05
    assert not graph.verify().ok


def test_in_place_of_a_model_autocast_is_as_it_was_recorded(tmp_path):
    model, observer = Model().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad(), autocast():
        for length in (5, 7):
            model(torch.randn(2, length, 8))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    x = torch.randn(3, 4, 8)
    with onnx_model.in_place_of(model) as calls, torch.no_grad():
        with autocast():
            assert model(x).dtype is torch.bfloat16
        with pytest.raises(ArgumentError, match=r"expected: torch.autocast\(.*\n  got: no autocast"):
            model(x)
    assert (calls.inside, calls.outside) == (1, 1)
    with onnx_model.in_place_of(model, outside="eager"), torch.no_grad():
        assert model(x).dtype is torch.float32
