"""What a model does besides returning a result: hooks, changed arguments, and results that differ from call to call."""

import pytest
import torch

import exportkit


def as_onnx(model, folder, *calls):
    torch.manual_seed(0)
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for call in calls:
            model(*call)
    return exportkit.export(model, observer).to_onnx(folder / "model.onnx")


def findings(onnx_model):
    return {finding.kind: finding.text for finding in onnx_model.contract.plan.findings}


class Fills(torch.nn.Module):
    """Writes into a cache that it does not return, and adds a key to a dict."""

    def forward(self, x, cache, batch):
        cache[:, -1] = x[:, 0]
        batch["hidden"] = x + 1
        return x + cache.sum(1, keepdim=True)


def filled(rows, length):
    return torch.randn(rows, 5), torch.randn(rows, length), {"scale": torch.ones(rows)}


def test_arguments_that_the_model_changes_are_changed_by_the_onnx_model(tmp_path):
    model = Fills()
    onnx_model = as_onnx(model, tmp_path, filled(2, 4), filled(3, 6))
    assert onnx_model.verify().ok
    assert "changes cache, batch in place" in findings(onnx_model)["changed input"]
    x, cache, batch = filled(4, 8)
    other = cache.clone(), dict(batch)
    expected, got = model(x, cache, batch), onnx_model(x, *other)
    torch.testing.assert_close((got, *other), (expected, cache, batch))


def test_arguments_are_changed_after_loading_too(tmp_path):
    model, observer = torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Linear(5, 3)), exportkit.InputObserver()
    with observer(model):
        for rows in (2, 3):
            model(torch.randn(rows, 5))
    exportkit.export(model, observer).save(tmp_path)
    x = torch.randn(4, 5)
    exportkit.load(tmp_path)(x)
    assert x.min() == 0


@pytest.mark.parametrize("before", [True, False])
def test_hooks_of_the_model_itself_are_exported(before, tmp_path):
    model = torch.nn.Linear(5, 3)
    if before:
        model.register_forward_pre_hook(lambda module, args: (args[0].clamp(max=1),))
    else:
        model.register_forward_hook(lambda module, args, result: result + 1)
    onnx_model = as_onnx(model, tmp_path, (torch.randn(2, 5),), (torch.randn(3, 5),))
    assert onnx_model.verify().ok
    x = 10 * torch.randn(4, 5)
    torch.testing.assert_close(onnx_model(x), model(x).detach(), rtol=1e-3, atol=1e-4)


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (2 if self.calls > 3 else 1)


class Random(torch.nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.rand_like(x)


def test_a_model_that_does_not_return_the_same_twice_is_not_proven(tmp_path):
    onnx_model = as_onnx(Random(), tmp_path, (torch.randn(2, 5),), (torch.randn(3, 7),))
    assert "the model is random or keeps state" in "".join(onnx_model.verify().problems())


def test_a_state_is_an_error_if_no_recorded_call_shows_what_it_was_first(tmp_path):
    with pytest.raises(exportkit.errors.ExportError, match="state that it keeps"):
        as_onnx(Counts(), tmp_path, (torch.randn(2, 5),), (torch.randn(3, 7),))


def test_random_numbers_are_named(tmp_path):
    onnx_model = as_onnx(Random(), tmp_path, (torch.randn(2, 5),), (torch.randn(3, 7),))
    assert "draws random numbers (rand_like in the model itself (Random))" in str(onnx_model.verify())
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    assert "random numbers" not in str(
        as_onnx(layer, tmp_path, (torch.randn(2, 5, 4),), (torch.randn(3, 7, 4),)).verify()
    )


def test_a_state_without_a_batch_is_carried_or_refused(tmp_path):
    class Last(torch.nn.Module):
        last = None

        def forward(self, x):
            result = x if self.last is None else x + self.last.mean()
            self.last = x
            return result

    onnx_model = as_onnx(Last(), tmp_path, (torch.randn(2, 5),), (torch.randn(3, 7),))
    onnx_model(torch.randn(4, 9))
    with pytest.raises(exportkit.errors.ArgumentError):  # no recorded call went on from a state of this size
        onnx_model(torch.randn(4, 9))


def test_keys_of_kwargs_may_be_any_text(tmp_path):
    class Summing(torch.nn.Module):
        def forward(self, x, **named):
            return x + sum(value.to(torch.float64) for value in named.values())

    model, observer, names = Summing(), exportkit.InputObserver(), ("x.1", "x_1", "class", "1", "input")
    with observer(model):
        for rows in (2, 3):
            model(torch.randn(rows, 5), **{name: torch.randn(rows, 5) for name in names})
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    given = {name: torch.randn(4, 5) for name in names}
    torch.testing.assert_close(onnx_model(torch.ones(4, 5), **given), model(torch.ones(4, 5), **given))
