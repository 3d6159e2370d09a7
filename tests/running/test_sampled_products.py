"""Runs in which products with large weights read a few of their entries."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import exportkit
from exportkit._torch_compat import sampled_products as module
from exportkit._torch_compat.sampled_products import sampled_products
from exportkit.probing.effects import changed_state, written_arguments


@pytest.fixture(autouse=True)
def _every_large_matrix_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENOUGH", module.LARGE)
    monkeypatch.setattr(module, "ENOUGH_KERNELS", module.LARGE_KERNEL)


@pytest.mark.parametrize(("inputs", "outputs"), [(512, 512), (600, 1300), (1300, 600)])
def test_rows_are_apart_and_every_input_counts(inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(inputs, outputs), torch.randn(3, 4, inputs)
    sampled = sampled_products(layer.parameters())
    assert sampled is not None
    with torch.no_grad(), sampled:
        y, first, twice = layer(x), layer(x[:1]), layer(2 * x)
        shown = layer(torch.eye(inputs)) - layer.bias
    assert y.shape == (3, 4, outputs)
    assert y.is_contiguous()
    assert torch.equal(y[:1], first)
    torch.testing.assert_close(twice - layer.bias, 2 * (y - layer.bias))
    assert shown.abs().sum(1).gt(0).all()
    assert (shown == 0).float().mean() > 0.9
    assert 0.5 < y.std() / layer(x).std() < 2


@pytest.mark.parametrize("make", [torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.ConvTranspose2d])
def test_every_channel_of_a_convolution_counts(make: type[torch.nn.Module]) -> None:
    torch.manual_seed(0)
    layer, x = make(64, 200, 3, stride=2, padding=1), torch.randn(2, 64, *[9] * (1 if make is torch.nn.Conv1d else 2))
    sampled = sampled_products(layer.parameters())
    assert sampled is not None
    with torch.no_grad(), sampled:
        y, nothing = layer(x), layer(torch.zeros_like(x))
        shown = [
            (layer(torch.where(torch.arange(64).view(-1, *[1] * (x.ndim - 2)) == n, x, 0)) - nothing) for n in (0, 63)
        ]
    with torch.no_grad():
        whole = layer(x)
        assert torch.equal(nothing, layer(torch.zeros_like(x)))  # the shift
    assert y.shape == whole.shape
    assert y.stride() == whole.stride()
    assert not torch.allclose(y, whole)
    assert 0.5 < y.std() / whole.std() < 2
    assert all(change.abs().flatten(2).sum(2).gt(0).all() for change in shown)
    assert len({round(channel.sum().item(), 4) for channel in y[0]}) > 190


def test_small_weights_are_read_whole() -> None:
    assert sampled_products(torch.nn.Conv2d(16, 16, 3).parameters()) is None
    assert sampled_products(torch.nn.Linear(64, 64).parameters()) is None


class Branches(torch.nn.Module):
    """Computes something else for one token, and for no second input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = torch.nn.Linear(8, width), torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, scale: float | None = None) -> torch.Tensor:
        x = self.out(self.into(x).relu())
        x = x * 5 if x.shape[1] == 1 else x - 1
        return x if y is None else x * y


class Products(TorchDispatchMode):
    """Counts whole products with large matrices."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.addmm.default and args[2].numel() >= 2**18:
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_large_model_has_the_domain_of_a_small_one() -> None:
    domains, counts = [], []
    for width in (16, 512):
        torch.manual_seed(0)
        model, observer = Branches(width).eval(), exportkit.InputObserver()
        with observer(model), torch.no_grad():
            model(torch.randn(2, 5, 8))
            model(torch.randn(3, 7, 8), torch.randn(3, 7, 1))
        with Products() as products:
            domains.append(str(exportkit.export(model, observer).domain))
        counts.append(products.count)
    assert domains[0] == domains[1]
    assert 0 < counts[1] < 12  # 36 without sampled products


def test_a_graph_of_a_large_model_refuses_what_was_not_shown(tmp_path) -> None:
    torch.manual_seed(0)
    model, observer = Branches(512).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, length in ((2, 5), (3, 7)):
            model(torch.randn(batch, length, 8))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    torch.testing.assert_close(onnx_model(x := torch.randn(1, 9, 8)), model(x).detach())
    with pytest.raises(exportkit.ExportkitError, match="x_axis_1"):
        onnx_model(torch.randn(4, 1, 8))


class Changes(torch.nn.Module):
    """Changes an argument and a buffer; raises where whole products are not seen, if asked to."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.layer, self.raises = torch.nn.Linear(512, 512), raises
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.raises and not torch.allclose(y, x @ self.layer.weight.T.clone() + self.layer.bias, atol=1e-4):
            raise ValueError("other weights")
        self.calls += 1
        total += y.sum()
        return y + total


@pytest.mark.parametrize("raises", [False, True])
def test_what_a_large_model_changes_is_known(raises: bool) -> None:
    torch.manual_seed(0)
    model = Changes(raises).eval()
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch in (2, 3):
            model(torch.randn(batch, 512), torch.zeros(1))
    observation = observer.observation
    with Products() as products:
        written = written_arguments(observation, model, "forward")
        changed = changed_state(model, "forward", observation.calls[0])
    assert [*written] == ["total"]
    assert written["total"].in_place == ("",)
    assert changed == ["calls"]
    assert (products.count > 0) == raises
    assert model.calls == 2
