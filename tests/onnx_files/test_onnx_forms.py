"""Operators that torch.onnx has no form for, at sizes that vary: what ONNX computes is what torch computes."""

import math

import pytest
import torch

import exportkit

functional = torch.nn.functional


class Computed(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def attended(x):
    x = x.transpose(1, 2)
    return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def attended_behind_a_mask(x):
    x = x.transpose(1, 2)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def filtered(x):
    found, kept = torch.fft.rfft(x), torch.zeros(len(x), 4, x.shape[2] // 2 + 1, dtype=torch.cfloat)
    kept[:, :, :3] = found[:, :, :3]
    return torch.fft.irfft(kept, n=x.shape[2])


def filled(x):
    z = torch.complex(x, x + 1)
    padded = functional.pad(z, (1, 2)).cumsum(2).masked_fill(x.new_zeros(1, dtype=torch.bool), 0)
    kept = torch.zeros_like(padded)
    kept[:, :, 1:4] = padded[:, :, 1:4] * torch.ones(3, dtype=torch.cfloat) + torch.full_like(z[:, :, :3], 2j)
    return (kept * kept.conj() / 2).abs(), kept == 2j


def frames(x):
    return torch.stft(x[:, 0], 12, 4, window=WINDOW, return_complex=True)


WINDOW = torch.hann_window(12)
FUNCTIONS = {
    "masked select": lambda x: x.masked_select(x > 0),
    "masked select by a mask to broadcast": lambda x: x.masked_select(x[:1] > 0),
    "median": lambda x: x.median(2),
    "median, axis kept": lambda x: x.median(1, keepdim=True).values,
    "k-th value": lambda x: x.kthvalue(3, 2),
    "cumulative product": lambda x: x.cumprod(1),
    "cumulative product in double precision": lambda x: x.cumprod(2, dtype=torch.float64),
    "distances": lambda x: torch.cdist(x, x + 1),
    "distances in blocks": lambda x: torch.cdist(x, x[:, :2], p=1),
    "largest distances": lambda x: torch.cdist(x, x[:, :2], p=math.inf),
    "buckets, one of NaN": lambda x: torch.bucketize(torch.where(x > 1, math.nan, x), torch.tensor([-1.0, 0.0, 0.5])),
    "places in sorted rows": lambda x: torch.searchsorted(x.sort(2).values, x, right=True, out_int32=True),
    "averages of windows": lambda x: functional.adaptive_avg_pool1d(x, 4),
    "averages of a plane": lambda x: functional.adaptive_avg_pool2d(x, (3, 5)),
    "averages of a volume": lambda x: functional.adaptive_avg_pool3d(x[:, None], (2, 3, 5)),
    "average of all": lambda x: functional.adaptive_avg_pool1d(x, 1),
    "largest of windows": lambda x: functional.adaptive_max_pool1d(x, 4, return_indices=True),
    "largest of a plane": lambda x: functional.adaptive_max_pool2d(x[:, None], (3, 5), return_indices=True),
    "complex arithmetic": lambda x: ((2 + x) * torch.exp(1j * x[..., :1]) / (x * 1j + 2) - 1j / 3).abs(),
    "complex choice": lambda x: torch.where(x > 0, torch.complex(x, x).conj() ** 2, 0.5).imag,
    "complex matrix product": lambda x: torch.einsum("bij,bkj->bik", torch.complex(x, x), torch.polar(x, x)).real,
    "windows of signals": lambda x: [
        torch.stft(x.flatten(1), 8, window=torch.hamming_window(8), return_complex=True).abs(),
        x.amax() * torch.hann_window(9, periodic=False),
        x.amax() * torch.kaiser_window(6) * torch.bartlett_window(6) * torch.blackman_window(6, periodic=False),
    ],
    "product of integers and floats": lambda x: torch.einsum("i, j -> ij", torch.arange(x.shape[1]), x[0, 0]),
    "product of truth values": lambda x: torch.einsum("bij,bij->bij", x > 0, x < 1),
    "product of 16-bit integers": lambda x: torch.einsum("bij,bkj", x.short(), x.short() + 1),
    "product of axes without letters": lambda x: (
        torch.einsum("b...,b...->b", x, x),
        torch.einsum("...i,i...", x, x[0].mT),
        torch.einsum("...,...", x, x[0]),
    ),
    "complex tensor in parts": filtered,
    "complex tensor like another one": filled,
    "transform and back": lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[2]),
    "transform of two axes and back": lambda x: torch.fft.ifft2(torch.fft.fft2(x, norm="ortho"), norm="forward").real,
    "frames and back": lambda x: torch.istft(frames(x) * 2, 12, 4, window=WINDOW),
    "shifted by half": lambda x: (x.roll(x.shape[2] // 2, 2), torch.fft.ifftshift(x)),
    "several dtypes side by side": lambda x: (
        torch.cat([x, x.double() + 1e-9, (x > 0).long()]),
        torch.stack([x > 0, x]),
        torch.hstack([x > 0, x]),
        torch.concat([x > 0, x], axis=1),
    ),
    "attention without heads": attended,
    "attention without heads, behind a mask": attended_behind_a_mask,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_onnx_computes_it_at_any_size(name, tmp_path):
    model, observer = Computed(FUNCTIONS[name]).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, length in ((2, 20), (3, 28)):
            model(torch.randn(batch, 4, length))
    report = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)


def test_random_numbers_are_drawn_from_the_same_distribution(tmp_path):
    draw = {
        "uniform": lambda x: torch.zeros_like(x).uniform_(-1, 2),
        "normal": lambda x: torch.normal(x * 0 + 0.5, 0.866),
    }
    model, observer = (
        Computed(lambda x: torch.stack([sample(x) for sample in draw.values()])),
        exportkit.InputObserver(),
    )
    with observer(model.eval()):
        model(torch.zeros(2, 8))
        model(torch.zeros(3, 12))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    uniform, normal = graph(torch.zeros(100, 1000))
    assert (uniform.min() >= -1, uniform.max() <= 2, normal.max() > 2) == (True, True, True)
    for found in (uniform, normal):
        assert found.mean() == pytest.approx(0.5, abs=0.02)
        assert found.std() == pytest.approx(0.866, abs=0.02)


def test_sums_of_exponentials_are_finite_along_any_axis(tmp_path):
    model, observer = Computed(lambda x: x.logcumsumexp(1)).eval(), exportkit.InputObserver()
    with observer(model):
        model(torch.randn(2, 8, 3))
        model(torch.randn(3, 12, 3))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    for length in (1, 15, 16, 17, 32, 300):
        x = torch.randn(2, length, 3) * torch.tensor([1.0, 100.0, 1e4])
        x[0, : length // 2, 0], x[1, length // 3 :, 1] = -math.inf, math.inf
        torch.testing.assert_close(graph(x), model(x), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_are_rounded_in_half_precision_as_the_model_does(dtype, tmp_path):
    model, observer = (
        Computed(lambda x: (x * 0.1, x / 0.7, x + 0.3, 1.1 - x, x * 0.5)).eval(),
        exportkit.InputObserver(),
    )
    with observer(model), torch.no_grad():
        expected = [model(torch.linspace(-3, 3, size).to(dtype)[None]) for size in (301, 400)]
    got = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")(torch.linspace(-3, 3, 301).to(dtype)[None])
    assert all(map(torch.equal, got, expected[0]))


def test_the_traced_program_has_the_operators_of_the_model(tmp_path):
    model, observer = Computed(FUNCTIONS["median"]).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch in (2, 3):
            model(torch.randn(batch, 4, 20))
    exported = exportkit.export(model, observer)
    exported.to_onnx(tmp_path / "model.onnx")
    assert torch.ops.aten.median.dim in {node.target for node in exported.program.graph.nodes}


@pytest.mark.parametrize("batch_first", [False, True])
def test_padding_reaches_the_longest_sequence_whichever_it_is(batch_first, tmp_path):
    pad = torch.nn.utils.rnn.pad_sequence
    model = Computed(lambda sequences: pad(sequences, batch_first, 0.5, "right" if batch_first else "left") * 2)
    observer = exportkit.InputObserver()
    with observer(model):
        for shorter, longer in ((3, 5), (4, 6), (2, 7)):
            model([torch.randn(shorter, 4), torch.randn(longer, 4)])
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    given = [torch.randn(8, 4), torch.randn(3, 4)]
    assert torch.equal(onnx_model(given), model(given))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_integers_are_subtracted_from_a_number_without_another_trace(dtype, tmp_path):
    model, observer = Computed(lambda mask: (1.5 - mask) * -10000.0), exportkit.InputObserver()
    with observer(model):
        for shape in ((2, 5), (3, 7)):
            model(torch.randint(0, 3, shape, dtype=dtype))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    assert [str(attempt) for attempt in onnx_model.exported.attempts] == ["plain trace: succeeded"]
