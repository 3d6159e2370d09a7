"""Operators that torch gives sizes as numbers, in a graph that serves any size."""

import math
import re
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import linspace
from torch.nn.functional import one_hot
from torch.nn.functional import scaled_dot_product_attention as attend

import exportkit


class Computed(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


functional = torch.nn.functional


def with_items(x):
    y, size = x.clone(), x.shape[1]
    y[:, size // 2] = 3.0
    y[0, size // 3] = x[1, 0]
    y[1:, size - 1] += x[:1, 0]
    return y


def with_diagonal(x):
    return (x.T @ x).fill_diagonal_(0)


def of_math(x):
    size = x.shape[1]
    return x / math.sqrt(3 * size) + math.log(size, 10) * math.exp(-size) + np.log(size) + divmod(size, 3)[1]


def padded_by_a_tensor(x):
    windows = torch.ceil(torch.as_tensor(x.shape[1] / 4)).long()
    y = functional.pad(x, (0, windows * 4 - x.shape[1]))
    return y * 2 if y.shape[1] > 3 else y  # so the size may not depend on values


def upper_pairs(x):
    rows, columns = torch.triu_indices(x.shape[1], x.shape[1], 1)
    return x[:, rows] * x[:, columns]


def resized_by_quotients(x):
    """A table of positions for images of one size, resized as DINO does: by a bit more, so that rounding goes down."""
    table, length = torch.arange(16.0).view(1, 1, 4, 4) * x[:1, :1, None, None], x.shape[1]
    positions = functional.interpolate(table, scale_factor=((length + 0.1) / 4, 2.0), mode="bicubic")
    assert positions.shape[2] == length
    modes = {(16,): ("nearest", "linear"), (4, 4): ("nearest", "nearest-exact", "bilinear"), (4, 2, 2): ("trilinear",)}
    found = [
        functional.interpolate(table.reshape(1, 1, *shape), scale_factor=(length + 0.1) / 4, mode=mode)
        for shape, names in modes.items()
        for mode in names
    ]
    others = {"recompute_scale_factor": True}, {"align_corners": True}
    return [
        positions + x[0, :, None],
        *found,
        *(functional.interpolate(table, scale_factor=length / 3, mode="bilinear", **options) for options in others),
    ]


def in_as_many_groups_as_rows(x):
    """Generators with styles convolve each image with weights of its own."""
    rows, length = x.shape
    images = torch.stack([x, x * 2], 1).reshape(1, rows * 2, length, 1)
    weight = torch.cat([x.mean(1), x.sum(1)])[:, None, None, None] * torch.arange(18.0).reshape(3, 3, 2)
    larger = functional.conv_transpose2d(images, weight, x.sum().expand(rows * 3), (2, 3), (1, 0), (1, 2), rows, (1, 2))
    return larger.view(rows, 3, *larger.shape[2:])


def last_ones(x):
    last = x[:, -6:]
    return torch.cat([x.new_zeros(len(x), 6 - last.shape[1]), last], 1), x[:, :6].cumsum(1), x[:, -6:-1]


def without_repeats(x):
    """Reads the best labels as a decoder for CTC does."""
    labels = torch.unique_consecutive(torch.stack([x[0], -x[0]]).log_softmax(0).argmax(0), dim=-1)
    return labels[labels != 0]


def unflattened(x):
    rows, length = x.shape
    return torch.nn.Unflatten(0, (rows, length))(x.flatten()), torch.nn.Unflatten(-1, [length, -1])(x)


def grid_of_numpy(x):
    rows, columns = np.meshgrid(np.arange(x.shape[0]), np.arange(x.shape[1])[::-1], indexing="ij")
    return x + torch.from_numpy(np.sin(rows / 7.0) - columns).to(x.dtype)


def by_imported_names(x):
    length = x.shape[1]
    tokens = x[:, None, :, None] * linspace(0, 1, length)[:, None]
    found = attend(tokens, tokens, tokens, is_causal=length > 1)[:, 0, :, 0]
    return found * one_hot(torch.arange(length), length).sum(0)


def to_frames_and_back(x):
    window, length = torch.hann_window(4), x.shape[1]
    frames = torch.stft(x, 4, 2, window=window, normalized=True, return_complex=True) * 2
    longer = torch.istft(frames, 4, 2, 4, window, True, True, None, length + 1 - length % 2)
    return frames.istft(4, 2, window=window, normalized=True, length=length), longer


def with_items_at_tensors(x):
    y, place = x.clone(), (x[0, 0] > 0).long() - 2
    y[:, place] = x[:, 1]
    y[..., None, place, None] += 1.5
    return y


def weighted_by_windows(x):
    length = x.shape[1]
    windows = [torch.hann_window, torch.hamming_window, torch.bartlett_window]
    parts = [x * window(length, periodic=is_periodic) for window in windows for is_periodic in (True, False)]
    return (
        *parts,
        x * torch.blackman_window(length),
        x * torch.hamming_window(length, True, 0.6, 0.4),
        x * torch.logspace(0, 2, length),
        x * linspace(-1, 1, length),
    )


def pooled_to_sizes(x):
    length, images = x.shape[1], x[:, None, None].expand(-1, 2, 4, -1)
    return (
        functional.adaptive_avg_pool1d(x, length // 2),
        functional.adaptive_avg_pool2d(images, (None, 2 * length + 1)),
        functional.adaptive_max_pool2d(images, (3, length - 2)),
        functional.interpolate(images, size=(2, length - 1), mode="area"),
    )


FUNCTIONS = {
    "pools to sizes": pooled_to_sizes,
    "items at tensors": with_items_at_tensors,
    "windows": weighted_by_windows,
    "frames to samples": to_frames_and_back,
    "functions that are imported by name": by_imported_names,
    "modules made of sizes": unflattened,
    "labels without repeats": without_repeats,
    "as many groups as rows": in_as_many_groups_as_rows,
    "slices of a number of elements": last_ones,
    "numbers of numpy": lambda x: x[:, : int(np.ceil(np.log(x.shape[1])).astype("int").item())],
    "numbers that numpy rounds": lambda x: x[:, : int(np.round(x.shape[1] * 0.3))],
    "arrays of numpy": grid_of_numpy,
    "sizes in tensors of a class": lambda x: (
        x / torch.FloatTensor([x.shape[1], 2.5]).sum() + torch.LongTensor([*x.shape])[1]
    ),
    "constants from behind": lambda x: x[:, :, None, None] * torch.ones(3, 4).tril().flip(0),
    "steps to a size": lambda x: x * torch.linspace(0.5, x.shape[1] - 0.5, x.shape[1]),
    "frequencies": lambda x: (x * torch.fft.fftfreq(x.shape[1], 0.5), torch.fft.rfftfreq(x.shape[1])),
    "upper triangle": upper_pairs,
    "lower triangle": lambda x: x[:, torch.tril_indices(x.shape[1], 3)[0]],
    "items at places": with_items,
    "diagonal": with_diagonal,
    "functions of sizes": of_math,
    "repeated by a size": lambda x: [x.T.repeat_interleave(x.shape[1], axis) for axis in (0, 1)],
    "one hot": lambda x: functional.one_hot(torch.arange(2), x.shape[1]).sum(0) * x,
    "pools over everything": lambda x: (
        functional.max_pool1d(x[:, None], x.shape[1]) + functional.avg_pool1d(x[:, None], kernel_size=x.shape[1:])
    ),
    "a size as a tensor": lambda x: x[:, : torch.ceil(torch.as_tensor(3 * x.shape[1] / 4)).long()],
    "sizes as a tensor": lambda x: x / torch.as_tensor([(1, x.shape[1]), (x.shape[1], 2)], dtype=torch.float32).sum(),
    "padding as a tensor": padded_by_a_tensor,
    "resized by quotients of sizes": resized_by_quotients,
    "quantiles": lambda x: (
        x.quantile(0.3, 1),
        x.quantile(0.4, interpolation="lower"),
        x.nanquantile(torch.tensor([0.2, 0.9]), 0, keepdim=True),
    ),
    "parts of almost equal size": lambda x: [part.sum(1) for part in x.tensor_split(3, 1)],
}


@pytest.mark.runtime
@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_size_is_served(name, tmp_path):
    model, observer = Computed(FUNCTIONS[name]), exportkit.InputObserver()
    with observer(model):
        for rows, length in ((2, 5), (3, 7)):
            model(torch.randn(rows, length))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    for length in (4, 6, 8, 12):
        x = torch.randn(4, length)
        torch.testing.assert_close(graph(x), model(x))


def test_distances_are_computed_for_any_number_of_rows():
    model, observer = (
        Computed(lambda x: torch.cdist(x, x[:, :2]) + torch.cdist(x[:1], x[:, 1:3], p=1)),
        exportkit.InputObserver(),
    )
    with observer(model):
        for rows, length in ((2, 5), (3, 7)):
            model(torch.randn(rows, length, 3))
    exported, x = exportkit.export(model, observer), torch.randn(2, 40, 3)
    assert exported.domain.explain({"x": x}).startswith("inside")
    torch.testing.assert_close(exported.program.module()(x=x), model(x))


def test_the_order_of_a_product_fixes_no_sizes(monkeypatch):
    def contract_path(equation, *operands, optimize, shapes=False):
        sizes = [operand if shapes else operand.shape for operand in operands]
        assert optimize == "auto"
        assert Decimal(math.prod(math.prod(size) for size in sizes)) > 0
        return [(1, 2), (0, 1)], None

    package = {"_opt_einsum": SimpleNamespace(contract_path=contract_path), "enabled": True, "strategy": "auto"}
    for name, value in {**package, "is_available": lambda: True}.items():
        monkeypatch.setattr(torch.backends.opt_einsum.m, name, value)
    weight = torch.randn(4, 4)
    model, observer = Computed(lambda x: torch.einsum("bnd,de,bne->bn", x, weight, x)), exportkit.InputObserver()
    with observer(model):
        for rows, length in ((2, 5), (3, 7)):
            model(torch.randn(rows, length, 4))
    program = exportkit.export(model, observer).program.module(check_guards=False)
    x = torch.randn(4, 6, 4)
    torch.testing.assert_close(program(x=x), model(x))


class Padded(torch.nn.Module):
    """Pads its input so that the last window is full, twice."""

    def forward(self, x):
        for window, step in ((7, 4), (4, 2)):
            windows = math.ceil((x.shape[-1] - window) / step + 1)
            x = torch.nn.functional.pad(x, (0, (windows - 1) * step + window - x.shape[-1]))
            x = torch.nn.functional.avg_pool1d(x, window, step)
        rounded = math.floor(x.shape[-1] / 2 + 1) + math.ceil(2 * x.shape[0] * x.shape[-1] / 3)
        return x + torch.zeros(math.ceil(x.shape[-1] / 1)) + rounded


def right_at(model, lengths):
    """Exports a model of sequences, compares the program with it at some lengths, and returns what was exported."""
    observer = exportkit.InputObserver()
    with observer(model):
        model(torch.randn(2, 1, 160))
        model(torch.randn(3, 1, 243))
    exported = exportkit.export(model, observer)
    for length in lengths:
        x = torch.randn(2, 1, length)
        torch.testing.assert_close(exported.program.module(check_guards=False)(x=x), model(x))
    return exported


def test_quotients_of_lengths_are_rounded_in_integers():
    right_at(Padded(), (37, 38, 39, 40, 95))


class PaddedAsTensorFlowDoes(torch.nn.Module):
    """Convolutions with strides whose results are as long as the input divided by the stride, rounded up."""

    KERNELS = (3, 2), (1, 2), (1, 3), (5, 3)

    def forward(self, x):
        for width, stride in self.KERNELS:
            windows = math.ceil(x.shape[-1] / stride)
            padding = max((windows - 1) * stride + width - x.shape[-1], 0)
            x = torch.nn.functional.pad(x, (padding // 2, padding - padding // 2))
            x = torch.nn.functional.conv1d(x, torch.ones(1, 1, width), stride=stride)
        return x


def test_a_padding_that_is_never_negative_is_not_limited():
    model = PaddedAsTensorFlowDoes()
    exported = right_at(model, (13, 37, 38, 39, 40, 96))
    sizes = [node.meta["val"].shape for node in exported.program.graph.nodes if "conv" in node.name]
    assert len(sizes) == len(model.KERNELS)
    assert "Max" not in str(sizes)  # each would occur in all that follow


class Windows(torch.nn.Module):
    """Cuts images into full windows of 7 by 7, then halves their sides three times, rounding up."""

    def forward(self, x):
        height, width = x.shape[1:3]
        below, right = (7 - height % 7) % 7, (7 - width % 7) % 7
        x = torch.nn.functional.pad(x, (0, right, 0, below))
        rows, columns = (height + below) // 7, (width + right) // 7
        x = x.view(x.shape[0], rows, 7, columns, 7).softmax(2).view(x.shape[0], rows * 7, columns * 7)
        x = x[:, :height, :width]
        for _ in range(3):
            x = torch.nn.functional.pad(x, (0, x.shape[2] % 2, 0, x.shape[1] % 2))
            x = x[:, 0::2, 0::2] + x[:, 1::2, 1::2]
        return x


def test_sizes_padded_to_full_windows_stay_short_and_any_are_served(tmp_path):
    model, observer = Windows(), exportkit.InputObserver()
    with observer(model):
        model(torch.randn(2, 20, 24))
        model(torch.randn(3, 31, 15))
    exported = exportkit.export(model, observer)
    assert "Mod" not in str(exported.program.graph.find_nodes(op="output")[0].args[0][0].meta["val"].shape)
    graph = exported.to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    for height, width in ((14, 21), (15, 22), (9, 10), (50, 33)):
        x = torch.randn(2, height, width)
        torch.testing.assert_close(graph(x), model(x))


class Trimmed(torch.nn.Module):
    """Cuts by a number that NumPy computes in double precision."""

    def forward(self, x, lengths):
        return x[:, : int(lengths.numpy()[0] * 0.29) + 1]


def test_arithmetic_of_numpy_is_refused():
    model, observer = Trimmed(), exportkit.InputObserver()
    with observer(model):
        for rows in (2, 3):
            model(torch.randn(rows, 40), torch.randint(1, 99, (rows,)))
    with pytest.raises(exportkit.ExportkitError, match=r"lengths\.numpy"):
        exportkit.export(model, observer)


def in_front(x, length):
    return functional.pad(x, (4 - length % 4, 0)) if length % 4 != 0 else x


def on_both_sides(x, length):
    lacking = 4 - length % 4
    return functional.pad(x, (lacking // 2, lacking - lacking // 2)) if lacking < 4 else x


def to_the_next_multiple(x, length):
    return functional.pad(x, (0, (length // 4 + 1) * 4 - length)) if length % 4 else x


def zeros_behind(x, length):
    return torch.cat([x, x.new_zeros(x.shape[0], 4 - length % 4)], 1) if length % 4 > 0 else x


def doubled_instead(x, length):
    return functional.pad(x, (0, 4 - length % 4)) if length % 4 else x * 2


def exported_at(function, *lengths):
    model, observer = Computed(lambda x: function(x, x.shape[1])), exportkit.InputObserver()
    with observer(model):
        for rows, length in enumerate(lengths, 2):
            model(torch.randn(rows, length))
    return model, exportkit.export(model, observer)


@pytest.mark.parametrize("lengths", [(8, 10), (12, 10)])
@pytest.mark.parametrize("function", [in_front, on_both_sides, to_the_next_multiple, zeros_behind])
def test_padding_to_a_multiple_in_a_branch_is_served_at_any_length(function, lengths):
    model, exported = exported_at(function, *lengths)
    for length in (4, 7, 9, 12, 16):
        x = torch.randn(3, length)
        torch.testing.assert_close(exported.program.module(check_guards=False)(x=x), model(x))
        assert exported.domain.explain({"x": x}).startswith("inside")


def test_another_branch_that_does_something_else_is_no_padding():
    _, exported = exported_at(doubled_instead, 8, 10)
    assert len(exported.programs) == 2
    assert re.search(r"x_axis_1 % 4 != 0|x_axis_1 % 4 == 0", exported.split.text)


def test_a_view_has_the_sizes_that_it_was_given():
    def windows(x):
        height, width = x.shape[1:3]
        return x.flatten(1).view(x.shape[0], height, width // 2, 2).sum(-1)

    model, observer = Computed(windows), exportkit.InputObserver()
    with observer(model):
        model(torch.randn(2, 3, 8))
        model(torch.randn(3, 5, 6))
    exported = exportkit.export(model, observer)
    (returned,) = exported.program.graph.find_nodes(op="output")[0].args[0]
    assert str(returned.meta["val"].shape[2]).count("s") == 1


class Cut(torch.nn.Module):
    """Cuts tokens to the longest sequence first."""

    def __init__(self, layer, batch_first=True):
        super().__init__()
        self.layer, self.batch_first = layer(8, 6, batch_first=batch_first), batch_first

    def forward(self, tokens, lengths):
        longest = int(lengths.max())
        return self.layer(tokens[:, :longest] if self.batch_first else tokens[:longest])[0]


class CutByTensor(torch.nn.Module):
    """Cuts tokens at a tensor, and masks what is behind each sequence."""

    def forward(self, tokens, lengths):
        longest = lengths.max()
        tokens = tokens[:, :longest].cumsum(1)
        return tokens * (torch.arange(longest)[None] < lengths[:, None])[..., None]


CUT = {"lstm": Cut(torch.nn.LSTM), "gru": Cut(torch.nn.GRU, batch_first=False), "tensor": CutByTensor()}


@pytest.mark.runtime
@pytest.mark.parametrize("name", CUT)
def test_sequences_may_be_cut_to_the_longest(name, tmp_path):
    model = CUT[name]

    def call(*lengths, further=3):
        rows = (len(lengths), max(lengths) + further, 8)
        tokens = torch.randn(rows if getattr(model, "batch_first", True) else (rows[1], rows[0], 8))
        return tokens, torch.tensor(lengths)

    observer = exportkit.InputObserver()
    with torch.no_grad(), observer(model.eval()):
        model(*call(4, 2))
        model(*call(3, 9, 5, further=0))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    for given in (call(5), call(2, 9, 6, 4)):
        torch.testing.assert_close(graph(*given), model(*given))
