"""Code that runs for some calls and was not traced: what it decides is found out, or such calls are refused."""

from collections import OrderedDict

import pytest
import torch

import exportkit
from exportkit.errors import ExportError

R = torch.rand


class Bits(torch.nn.Module):
    def forward(self, x):
        if x.shape[0] == 1 and (x.shape[1] & 7) == 4:
            return x * 3
        return x * 2


class Ratio(torch.nn.Module):
    def forward(self, x):
        if x.shape[0] == 1 and x.shape[1] / x.shape[2] > 3:
            return x * 3
        return x * 2


class Area(torch.nn.Module):
    def forward(self, x):
        if x.shape[0] == 1 and x.shape[1] * x.shape[2] > 65536:
            return x * 3
        return x * 2


class Square(torch.nn.Module):
    def forward(self, x):
        if x.shape[0] == 1 and x.shape[1] == x.shape[2]:
            return x * 3
        return x * 2


class ManyComparisons(torch.nn.Module):
    def forward(self, x):
        for number in range(1, 13):
            if x.shape[0] == 1 and x.shape[1] == 100 * number and number > 8:
                return x * 3
        return x * 2


class LengthWithout(torch.nn.Module):
    def forward(self, x, y=None):
        rows = len(x)
        if y is None and rows == 1:
            return x * 3
        return x * 2


class RemainderWithout(torch.nn.Module):
    def forward(self, x, y=None):
        n = int(x.shape[1])
        if y is None and n % 8 == 3:
            return x * 3
        return x * 2


class PeakOfOne(torch.nn.Module):
    def forward(self, x):
        if x.shape[0] == 1 and x.abs().max() > 100:
            return x * 3
        return x * 2


class TokenWithout(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 4)

    def forward(self, ids, y=None):
        found = self.embedding(ids)
        if y is None:
            return found * 3 if (ids == 7).any() else found
        return found + y.sum() * 0


class NestedWithout(torch.nn.Module):
    def forward(self, x, y=None):
        if y is None and x.sum() > 1000 and x.min() > 50:
            return x * 3
        return x * 2


class NumberWithout(torch.nn.Module):
    def forward(self, x, y=None):
        if y is None:
            return x * 3 if x.max().item() == 7 else x * 2
        return x * 2


class LayoutWithout(torch.nn.Module):
    def forward(self, x, y=None):
        if y is None and not x.is_contiguous():
            return x * 3
        return x * 2


class Clipped(torch.nn.Module):
    def forward(self, x, clip=True):
        peak = float(x.abs().max())
        if clip and peak > 1:
            x = x / peak
        return x * 2


class Chunked(torch.nn.Module):
    def forward(self, x, chunked=False):
        rows = len(x)
        if chunked and rows > 1000:
            return x * 3
        return x * 2


class Joined(torch.nn.Module):
    def forward(self, parts):
        return torch.cat(list(parts.values()), -1)


class ManyImages(torch.nn.Module):
    def forward(self, images):
        found = torch.cat(images).sum(-1)
        return found * 3 if len(images) >= 4 else found


class Clamped(torch.nn.Module):
    def forward(self, images):
        return {"images": [image.clamp(0, 1) for image in images], "sums": torch.cat(images).sum(-1)}


class Identical(torch.nn.Module):
    def forward(self, x, y):
        return x * 2 if x is y else x * 3


class Conjugate(torch.nn.Module):
    def forward(self, x):
        return x * 2 if x.is_conj() else x * 3


class Negative(torch.nn.Module):
    def forward(self, x):
        return x * 2 if x.is_neg() else x * 3


class OwnLog(torch.nn.Module):
    def forward(self, x):
        self.log = {}
        if x.shape[1] > 200:
            self.log.update(scale=3)
        return x * self.log.get("scale", 2)


def ids(*shape):
    return torch.randint(8, 50, shape)


def waves(*shape):
    return torch.randn(*shape, dtype=torch.complex64)


TWICE = (R(2, 4),) * 2
WITHOUT = [(R(6, 4), R(3, 2)), (R(9, 5),), (R(7, 6), R(5, 2))]
# The model, its recorded calls, and calls that it answers in another way.
CASES = [
    (Bits, [(R(2, 9),), (R(3, 7),)], [(R(1, 12),), (R(1, 20),)]),
    (Ratio, [(R(2, 9, 5),), (R(3, 7, 11),)], [(R(1, 31, 10),), (R(1, 90, 9),)]),
    (Area, [(R(2, 9, 5),), (R(3, 7, 11),)], [(R(1, 300, 300),)]),
    (Square, [(R(2, 9, 5),), (R(3, 7, 11),)], [(R(1, 64, 64),), (R(1, 5, 5),)]),
    (ManyComparisons, [(R(2, 9),), (R(3, 7),)], [(R(1, 900),), (R(1, 1200),)]),
    (LengthWithout, [(R(6, 4), R(3, 2)), (R(9, 4),), (R(7, 4), R(5, 2))], [(R(1, 4),)]),
    (RemainderWithout, WITHOUT, [(R(5, 11),), (R(5, 19),)]),
    (PeakOfOne, [(R(2, 4),), (R(3, 4),)], [(R(1, 4) * 1000,)]),
    (TokenWithout, [(ids(2, 5), R(3, 2)), (ids(3, 6),), (ids(4, 3), R(5, 2))], [(torch.full((2, 5), 7),)]),
    (NestedWithout, WITHOUT, [(R(5, 40) * 10 + 60,)]),
    (NumberWithout, WITHOUT, [(torch.full((5, 4), 7.0),)]),
    (LayoutWithout, WITHOUT, [(R(6, 5).t(),)]),
    (Clipped, [(R(6, 4), False), (R(7, 4), False)], [(R(5, 4) * 10,)]),
    (Clipped, [(R(6, 4), False), (R(9, 4) / 2, True), (R(7, 4), False)], [(R(5, 4) * 10, True)]),
    (Chunked, [(R(6, 4), False), (R(9, 4), True), (R(7, 4), False)], [(R(2000, 4), True)]),
    (Joined, [({0: R(2, 4), 1: R(2, 4)},), ({0: R(3, 4), 1: R(3, 4)},)], [({1: R(2, 4), 0: R(2, 4)},)]),
    (Joined, [(OrderedDict(a=R(2, 4), b=R(2, 4)),)], [(OrderedDict(b=R(2, 4), a=R(2, 4)),)]),
    (ManyImages, [([R(2, 4), R(3, 4)],), ([R(2, 4)],), ([R(2, 4), R(5, 4), R(1, 4)],)], [([R(2, 4)] * 5,)]),
    (Clamped, [([R(2, 4), R(3, 4)],), ([R(2, 4)],)], [([R(2, 4) * 5, R(2, 4) * 5],)]),
    (Identical, [(R(2, 4), R(2, 4)), (R(3, 4), R(3, 4))], [TWICE]),
    (Conjugate, [(waves(2, 4),), (waves(3, 4),)], [(waves(2, 4).conj(),)]),
    (Negative, [(R(2, 4),), (R(3, 4),)], [(waves(2, 4).conj().imag,)]),
    (OwnLog, [(R(2, 4),), (R(3, 6),)], [(R(2, 300),)]),
]


def observed(model, calls):
    observer = exportkit.InputObserver()
    with observer(model):
        for call in calls:
            model(*call)
    return observer


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in tensors(part)]


@pytest.mark.parametrize(("cls", "calls", "others"), CASES)
def test_no_call_has_another_result_than_the_models(cls, calls, others, tmp_path):
    model = cls().eval()
    with torch.no_grad():
        try:
            graph = exportkit.export(model, observed(model, calls)).to_onnx(tmp_path / "model.onnx")
        except ExportError:
            return
        assert graph.verify().ok
        for call in others:
            try:
                got = graph(*call)
            except exportkit.ExportkitError:
                continue
            expected = model(*call)
            assert [torch.allclose(*pair) for pair in zip(tensors(got), tensors(expected), strict=True)] == [
                True for _ in tensors(expected)
            ]


def test_a_comparison_of_several_sizes_is_stated_as_it_is():
    model = Area()
    domain = exportkit.export(model, observed(model, [(R(2, 9, 5),), (R(3, 7, 11),)])).domain
    assert "batch != 1 or x_axis_1 * x_axis_2 <= 65536" in domain.limits()


class Largest(torch.nn.Module):
    """Keeps the largest value so far, by which it decides beyond 100."""

    def __init__(self):
        super().__init__()
        self.largest = torch.zeros(())

    def forward(self, x):
        self.largest = torch.maximum(self.largest, x.abs().max())
        return torch.where(self.largest > 100, x * 3, x * 2)


class Counted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x / 2 if self.calls > 100 else x * 2


@pytest.mark.parametrize("cls", [Largest, Counted])
def test_a_state_that_no_recorded_call_shows_is_an_error(cls):
    model = cls()
    with pytest.raises(ExportError, match="state that it keeps"):
        exportkit.export(model, observed(model, [(R(2, 4),), (R(3, 4),)]))


class CountsOnItsClass(torch.nn.Module):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return x * 2


def test_values_on_classes_are_restored_and_reported():
    model = CountsOnItsClass()
    observer = observed(model, [(R(2, 4),), (R(3, 4),)])
    findings = exportkit.export(model, observer).plan.findings
    assert [finding.where for finding in findings if finding.kind == "state"] == ["CountsOnItsClass.calls"]
    assert CountsOnItsClass.calls == 2


class ClampsInPlace(torch.nn.Module):
    def forward(self, x):
        x.clamp_(0, 1)
        return x * 2


class Harmless(torch.nn.Module):
    """Computes the same on each branch, checks values, and steps through a loop."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x, y=None):
        x = self.layer(x)
        if x.shape[0] == 1 or y is None:
            if x.isnan().sum().item() > 1000:
                raise ValueError("too many numbers are unknown")
            result = x * 2 if x.abs().max() > 0.5 else x + x
            root, step = x.sum().abs(), x.sum() * 0 + 1
            for _ in range(30):
                root = root - step * 0
            return result if root > 3 else result + 0
        return x * 2


def test_branches_that_make_no_difference_limit_nothing(tmp_path):
    model = Harmless().eval()
    with torch.no_grad():
        exported = exportkit.export(model, observed(model, [(R(2, 4), R(3)), (R(3, 4),), (R(5, 4), R(3))]))
    assert len(exported.programs) == 1
    graph = exported.to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    for call in ((R(1, 4),), (R(1, 4), R(3)), (R(4, 4) * 9,)):
        torch.testing.assert_close(graph(*call), model(*call).detach(), rtol=1e-4, atol=1e-5)


class Steps(torch.nn.Module):
    def forward(self, x):
        if x.shape[0] == 1 and (x.shape[1] // 14) * (x.shape[2] // 14) > 256:
            return x * 3
        return x * 2


def test_a_comparison_in_steps_leaves_out_sizes(tmp_path):
    model = Steps()
    graph = exportkit.export(model, observed(model, [(R(2, 9, 5),), (R(3, 7, 11),)])).to_onnx(tmp_path / "model.onnx")
    x = R(1, 300, 300)
    with pytest.raises(exportkit.ExportkitError):
        graph(x)


class EmptiesOne(torch.nn.Module):
    def forward(self, x):
        result = x * 2
        if x.shape[0] == 1:
            x.zero_()
        return result


class EmptiesWithout(torch.nn.Module):
    def forward(self, x, y=None):
        result = x * 2
        if y is None:
            x[:] = 0
        return result


@pytest.mark.parametrize(
    ("cls", "calls", "other"),
    [(EmptiesOne, [(R(2, 4),), (R(3, 4),)], R(1, 4)), (EmptiesWithout, [(R(2, 4), R(3)), (R(3, 4), R(5))], R(2, 4))],
)
def test_no_write_is_missed(cls, calls, other, tmp_path):
    model = cls()
    graph = exportkit.export(model, observed(model, calls)).to_onnx(tmp_path / "model.onnx")
    with pytest.raises(exportkit.ExportkitError):
        graph(other)


def test_a_write_that_changed_no_recorded_value_is_written_back(tmp_path):
    model = ClampsInPlace()
    graph = exportkit.export(model, observed(model, [(R(2, 4),), (R(3, 4),)])).to_onnx(tmp_path / "model.onnx")
    x = R(2, 4) * 5
    graph(x)
    assert x.max() <= 1


class AsksAgain(torch.nn.Module):
    """Returns early if nothing is masked, so that the second question has one answer."""

    def forward(self, x, mask, y=None):
        if y is None:
            if mask.all():
                return x * 2
            if mask[:, : x.shape[1]].all():
                return x * 3
        return x * 2 * mask[..., None] + x * 2 * ~mask[..., None]


def test_a_question_that_was_answered_before_is_no_branch(tmp_path):
    model, mask = AsksAgain(), torch.ones(4, 5, dtype=torch.bool)
    mask[0, 0] = False
    calls = [(R(4, 5, 2), mask, R(3)), (R(4, 5, 2), mask), (R(3, 7, 2), mask.new_ones(3, 7), R(3))]
    exported = exportkit.export(model, observed(model, calls))
    assert len(exported.programs) == 1
    assert exported.to_onnx(tmp_path / "model.onnx").verify().ok
