"""Parts of a tensor that are as long as another input says: any number of parts, any lengths."""

import pytest
import torch

import exportkit


def of_a_split(self, x, lengths):
    means = torch.stack([part.mean(0) for part in x.split(lengths.tolist())])
    parts = []
    for part in torch.split(self.layer(x), lengths.tolist(), dim=0):
        parts.append(part.softmax(0))
    return means, torch.cat(parts), torch.nn.utils.rnn.pad_sequence(x.split(lengths.tolist()), batch_first=True)


def of_slices(self, x, lengths):
    found, start, sizes = [], 0, lengths.tolist()
    for size in sizes:
        found.append(self.layer(x[start : start + size]).amax(0) / size)
        start += size
    return torch.stack(found), x.new_zeros(len(lengths), max(sizes))


def with_parts_set(self, x, lengths):
    found, start, padded = torch.zeros_like(x), 0, x.new_zeros(lengths.shape[0], int(lengths.max()), 4)
    for i, size in enumerate(lengths.tolist()):
        found[start : start + size] = self.layer(x[start : start + size]).softmax(0)
        padded[i, :size] = x[start : start + size]
        start += size
    return found, padded


def of_segments(self, x, lengths):
    owner = torch.repeat_interleave(torch.arange(lengths.shape[0]), lengths)
    sums = x.new_zeros(lengths.shape[0], 4).index_add(0, owner, self.layer(x))
    return sums / lengths[:, None], sums[owner] + x


class Ragged(torch.nn.Module):
    """Takes parts that are in one tensor one after the other."""

    def __init__(self, function):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.function = function

    def forward(self, x, lengths):
        return self.function(self, x, lengths)


def call(*lengths):
    return torch.randn(sum(lengths), 4), torch.tensor(lengths)


@pytest.mark.runtime
@pytest.mark.parametrize("function", [of_a_split, of_slices, with_parts_set, of_segments])
def test_parts_may_be_any_number_and_of_any_length(function, tmp_path):
    model, observer = Ragged(function).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for lengths in ((3, 5), (4, 2, 4), (1, 6, 2)):
            model(*call(*lengths))
    plan = observer.plan()
    assert [variable.evidence for variable in plan.variables] == [
        "one length for each part", "as many as the sum of lengths says",
    ]  # fmt: skip
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    report = onnx_model.verify()
    assert report.ok, report.problems()
    assert {row.sizes["x_axis_0"] for row in report.rows} >= {1, 8, 10, 9}
    for lengths in ((1,), (7,), (2, 2), (1, 1, 1), (1, 9, 2, 30, 4), (3,) * 40):
        given = call(*lengths)
        with torch.no_grad():
            torch.testing.assert_close(onnx_model(*given), model(*given))
    if function is of_a_split:
        with pytest.raises(exportkit.errors.RuntimeFailure, match="a check on values failed"):
            onnx_model(torch.randn(9, 4), torch.tensor([3, 5]))


def test_an_input_that_happens_to_add_up_to_rows_says_nothing_about_them():
    class Labelled(torch.nn.Module):
        def forward(self, x, labels):
            return x.softmax(1), labels + 1

    model, observer = Labelled(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for labels in ((3, 5), (4, 2, 4)):
            model(*call(*labels))
    assert observer.plan().grids == ()


class Weighted(torch.nn.Module):
    """Takes a weight for each row, which may be left out."""

    def forward(self, x, lengths, weights=None):
        weights = torch.zeros(x.shape[0]) if weights is None else weights
        return torch.stack([part.sum(0) for part in (x + weights[:, None]).split(lengths.tolist())])


@pytest.mark.runtime
def test_an_input_of_as_many_rows_may_be_left_out(tmp_path):
    model, observer = Weighted(), exportkit.InputObserver()
    with observer(model):
        for number, lengths in enumerate(((3, 5), (4, 2, 4), (1, 6, 2))):
            x, parts = call(*lengths)
            model(x, parts, *([torch.randn(len(x))] if number else []))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    for lengths in ((7,), (2, 11), (1, 9, 2, 30)):
        x, parts = call(*lengths)
        for more in ([], [torch.randn(len(x))]):
            torch.testing.assert_close(onnx_model(x, parts, *more), model(x, parts, *more))
