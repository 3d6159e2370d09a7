"""Operators at values where the form that torch.onnx writes computes other numbers: onnxruntime computes torch's."""

import math

import onnxruntime
import pytest
import torch

from exportkit.onnx_files.translate import onnx_program
from exportkit.rewrites.lists import operators_at_any_length

functional, aten = torch.nn.functional, torch.ops.aten
NAN, INF = math.nan, math.inf


class Operator(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def exported(function, *tensors):
    """A session of an operator that was exported with a first axis of any size."""
    axes = {"tensors": tuple({0: torch.export.Dim.AUTO} if x.ndim and len(x) > 1 else None for x in tensors)}
    with operators_at_any_length():
        program = torch.export.export(Operator(function).eval(), tensors, dynamic_shapes=axes)
    content = onnx_program(program).model_proto.SerializeToString()
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])


def check(session, function, *tensors, rtol=2e-6):
    wanted = function(*tensors)
    feeds = {value.name: x.numpy() for value, x in zip(session.get_inputs(), tensors, strict=True)}
    found = session.run(None, feeds)
    for one, other in zip(wanted if isinstance(wanted, tuple) else (wanted,), found, strict=True):
        torch.testing.assert_close(torch.from_numpy(other), one, rtol=rtol, atol=0, equal_nan=True)


def floats(*values):
    return torch.tensor(values, dtype=torch.float32)


def ints(*values):
    return torch.tensor(values, dtype=torch.int64)


LARGE = ints(20000001, -20000001, 2**53 + 1, -(2**53) - 1, 7, -7)
SMALL = floats(1e-7, -1e-7, 3e-8, 1e-20, 1e-3, 0.4, -0.4, 0.0, 88.0, -88.0, INF, NAN)
FAR = floats(-114.0, 114.0, -89.0, 30.0, -30.0, 1e-7, 0.0, INF, -INF, NAN, 1e4, -1e4)
ODD = floats(1e8, -1e8, -1.0, 1.0, 0.35, -0.35, 7.3, INF, NAN, 0.0)

UNKNOWN = torch.tensor([[1.0, NAN, 3.0], [4.0, 5.0, 6.0], [NAN, -1.0, 2.0], [INF, NAN, -INF]])
SCORES = torch.tensor([[0.3, -1.0, 2.0, 0.1], [1.5, 0.2, -0.7, 3.0], [0.0, 0.4, 0.9, -2.0]])
ANGLES = floats(0.0, -0.0, 1.0, -1.0, 1e-30, -3e30, INF, -INF, NAN)


def filled_with_zeros(x, index):
    x = x.clone()
    x[index] = 0.0
    return x


CASES = {
    "softmax of integers": (
        lambda x: (x.softmax(0, dtype=torch.float32), (x > 0).log_softmax(0, dtype=torch.float32)),
        ints(3, -2, 0, 5),
    ),
    "softmax of half precision in single precision": (lambda x: x.half().softmax(-1, dtype=torch.float32), SCORES * 9),
    "powers of booleans": (lambda x: ((x > 0) ** 2, (x > 0) ** 0), ints(3, -2, 0, 5)),
    "floor division of integers": (lambda x: torch.div(x, 3, rounding_mode="floor"), LARGE),
    "floor division by a negative integer": (lambda x: torch.div(x, -3, rounding_mode="floor"), LARGE),
    "truncating division of integers": (lambda x: torch.div(x, 3, rounding_mode="trunc"), LARGE),
    "floor division of numbers": (lambda x: torch.div(x, 0.1, rounding_mode="floor"), floats(1.0, -1.0, 0.3, 9e7, INF)),
    "floor division operator": (lambda x, y: x // y, floats(1.0, -1.0, 5.0, 5.0), floats(0.1, 0.1, 0.0, -3.0)),
    "division of a number": (
        lambda x, y: (7 // x, torch.div(-7, x, rounding_mode="trunc"), 7.5 // y),
        ints(2, -3, 7, 9),
        floats(2.0, -0.5, 4.0, 7.5),
    ),
    "limits of two types": (
        lambda x, y: (x.clamp(-1, 0.5), x.clamp(max=2, min=-0.5), y.clamp(1, 2.5), x.clone().clamp_(-1, 0.7)),
        ODD,
        ints(-1, 2, 9),
    ),
    "remainder": (lambda x: x % 0.7, ODD),
    "remainder by a negative number": (lambda x: x % -0.7, ODD),
    "remainder of integers": (lambda x: x % -3, LARGE),
    "remainder with the sign of the dividend": (lambda x: x.fmod(-3), LARGE),
    "log1p": (torch.log1p, SMALL.clamp(min=-0.5)),
    "expm1": (torch.expm1, SMALL),
    "log of a sigmoid": (functional.logsigmoid, FAR),
    "sigmoids as results": (
        lambda x: (x.sigmoid(), torch.cat([x, x.sigmoid()])[None], (x.sigmoid() * x.sigmoid()).sqrt()),
        FAR,
    ),
    "log of a sum of exponentials": (torch.logaddexp, FAR, FAR.flip(0)),
    "log of a sum, same values": (torch.logaddexp, FAR, FAR),
    "log of a sum of powers of two": (torch.logaddexp2, FAR, FAR.flip(0)),
    "binary cross entropy": (
        lambda x, y: functional.binary_cross_entropy_with_logits(x, y, reduction="none"),
        floats(-114.0, 114.0, 5.0, -5.0),
        floats(1.0, 0.0, 0.5, 0.0),
    ),
    "largest and smallest": (lambda x: (x.amax(1), x.amin((0, 1)), x.amax(), x.max(), x.min()), UNKNOWN),
    "largest and smallest with their places": (lambda x: (*x.max(1), *x.min(1, keepdim=True)), UNKNOWN),
    "means and sums along long axes": (
        lambda x: (x.mean((1, 2)), x.sum((1, 2)), x.var((1, 2)), x.mean()),
        torch.linspace(0.5, 1.5, 3 * 64 * 8000).reshape(3, 64, 8000),
    ),
    "sums of integers": (
        lambda x: (x.sum(), x.sum(1), x.sum((0, 1), keepdim=True), x.cumsum(1), x @ x.T),
        torch.stack([LARGE, LARGE * 2**9 + 1, LARGE.flip(0) - 2**62]),
    ),
    "sums of smaller integers": (
        lambda x: ((x > 3).sum(1), x.sum(), x.to(torch.int32).sum(0)),
        LARGE.view(2, 3) % 2**30,
    ),
    "products of matrices of integers": (
        lambda x, y: (torch.addmm(x, x, y), torch.addmm(x, x, y, beta=2, alpha=3)),
        ints(1, 2, 2**53 + 1, -4).view(2, 2),
        ints(3, -2, 1, 2**55 + 1).view(2, 2),
    ),
    "places": (lambda x: (x.argmax(1), x.argmin(1), x.argmax(), x.argmin(), x.argmax(keepdim=True)), UNKNOWN),
    "median": (lambda x: (*x.median(1), x.median()), UNKNOWN),
    "largest and smallest integers": (
        lambda x: (x.amax(), x.amax(1), x.amin((0, 1), keepdim=True), *x.max(0), *x.min(1, keepdim=True)),
        LARGE.view(2, 3),
    ),
    "so far the largest and smallest": (
        lambda x: (*x.cummax(0), *x.cummin(1), *x.int().cummax(1)),
        UNKNOWN.nan_to_num(neginf=0.0, posinf=9.0),
    ),
    "so far the largest, with NaN": (lambda x: tuple(x.cummax(1)), UNKNOWN),
    "median of what is known": (lambda x: (*x.nanmedian(1), x.nanmedian()), UNKNOWN),
    "in a set": (lambda x: (torch.isin(x, ints(7, 3)), torch.isin(x, ints(7), invert=True)), LARGE),
    "what is not NaN": (lambda x, y: (x.fmax(y), x.fmin(y)), ODD, ODD.flip(0)),
    "length and sign": (lambda x, y: (x.hypot(y), x.copysign(y)), *torch.cartesian_prod(ANGLES, ANGLES).T),
    "signs and limits of integers": (
        lambda x: (x.sign(), x.relu(), functional.relu6(x), x.isnan(), x.isfinite(), x.floor(), (x > 3) + (x < 0)),
        LARGE,
    ),
    "operands of two dtypes": (lambda x, y: (torch.divide(x, y), torch.multiply(x, y)), floats(1, 2, 3), ints(2, 3, 7)),
    "infinities that are scattered": (
        lambda x, y: torch.zeros(4, 3).scatter_reduce(1, y, x, "amax", include_self=False),
        torch.full((4, 3), -INF),
        ints(0, 0, 1, 2, 2, 2, 0, 1, 1, 0, 1, 2).reshape(4, 3),
    ),
    "averages of some rows": (
        lambda x, y: torch.ones(5, 3).index_reduce(0, y, x, "mean"),
        torch.arange(12.0).reshape(4, 3),
        ints(0, 3, 3, 1),
    ),
    "averages of windows": (lambda x: functional.adaptive_avg_pool1d(x.T, 3), UNKNOWN),
    "norm over everything": (
        lambda x: (torch.linalg.vector_norm(x, keepdim=True), torch.linalg.vector_norm(x, INF, keepdim=True)),
        torch.arange(12.0).reshape(4, 3),
    ),
    "norms": (lambda x: (x.norm(INF, dim=1), x.norm(-INF, dim=0), x.norm(dim=1), x.norm(1)), UNKNOWN),
    "sign": (lambda x: (x.sign(), torch.sgn(x)), UNKNOWN),
    "logarithms of powers": (
        lambda x, y: (x.log2(), (10**y).log10(), x.float().log2()),
        2.0 ** torch.arange(-30.0, 31.0).double(),
        torch.arange(-15.0, 16.0).double(),
    ),
    "limits in double precision": (
        lambda x: (x >= 0.1, x // 0.1, (x / 0.1).floor(), x.clamp(0.1, 0.9) == x, torch.full_like(x, 0.1) == x),
        torch.arange(11).double() / 10,
    ),
    "powers of a half": (lambda x: (x**0.5, x**-0.5, x.abs() ** 0.5), floats(-INF, INF, -0.0, 0.0, NAN, 2.0, -1.0)),
    "powers of integers": (
        lambda x, y: (x**y, x**20, 3 ** y.clamp(max=39)),
        ints(3, 7, -3, 2, 10),
        ints(35, 20, 35, 63, 18),
    ),
    "inverse powers of integers": (lambda x, y: x**y, ints(1, -1, -1, 5), ints(-2, -3, -2, -1)),
    "limits of large integers": (
        lambda x, y: (x.maximum(y), x.minimum(y), x.clamp(5, 2**40), x.clamp(min=y), x.clamp(max=2**31 + 1)),
        ints(2**24 + 1, 2**31 + 1, 2**53 + 1, -(2**40)),
        ints(2**31 + 1, 2**24 + 1, 3, 2**35),
    ),
    "limits of numbers": (lambda x: (x.clamp(min=0), x.clamp(max=0), x.clamp(-1, 1), x.clamp(2, 1)), FAR),
    "limits one after another": (
        lambda x: (x.clamp(min=-1.0).clamp(max=2.0), x.clamp(min=0.5).clamp(max=9.0), x.clamp(max=7.0).clamp(min=3.0)),
        FAR,
    ),
    "limits after limits": (
        lambda x: (
            x.clamp(0, 1).clamp(2, 3),
            x.clamp(-1, 1).clamp(0, 3),
            x.clamp(-5, -1).relu(),
            x.relu().clamp(-2, 7),
        ),
        FAR,
    ),
    "values without repeats": (
        lambda x: (
            torch.unique_consecutive(x, dim=-1),
            *torch.unique_consecutive(x.int(), return_inverse=True, return_counts=True),
            torch.unique_consecutive(x[None].double()),
        ),
        ints(2**31 - 1, 2**31 - 1, 0, 0, 0, 5, 0),
    ),
    "counts": (
        lambda x: (
            torch.bincount(x, minlength=x.shape[0] + 3),
            torch.bincount(x, minlength=2),
            torch.bincount(x, x * 0.5, minlength=x.shape[0]),
            torch.bincount(x, x),
            torch.bincount(x[:0]),
        ),
        ints(0, 4, 1, 4),
    ),
    "angles": (torch.atan2, *torch.cartesian_prod(ANGLES, ANGLES).T),
    "angles of integers": (torch.atan2, *torch.cartesian_prod(ints(-2, 0, 3), ints(-1, 0, 5)).T),
    "angle, sign bit and step": (lambda x: (x.angle(), x.signbit(), torch.heaviside(x, x.abs() + 2)), ANGLES),
    "derivatives": (
        lambda x: (aten.silu_backward(x.abs() + 2, x), aten.mish_backward(x.abs() + 2, x)),
        floats(-2.5, -1.0, -0.5, -0.1, 0.0, 0.1, 1.0, 3.0, 30.0, NAN),
    ),
    "diagonals": (
        lambda x: (x.diagonal(), x.diagonal(1), x.diagonal(-2), x[None].diagonal(dim1=-1, dim2=1), x.diagonal(7)),
        UNKNOWN,
    ),
    "variances": (
        lambda x: (
            x.var(1),
            x.var(1, correction=0),
            x.var(correction=20),
            *torch.var_mean(x, 1, correction=5),
            x.std(),
        ),
        torch.arange(12.0).reshape(4, 3) ** 2,
    ),
    "averages divided by a number": (
        lambda x: functional.avg_pool2d(x[None, None], 2, padding=1, divisor_override=3),
        torch.arange(12.0).reshape(4, 3),
    ),
    "booleans where a mask is set": (lambda x: (x > 0).masked_fill(x > 2, False), UNKNOWN),
    "one of two booleans": (lambda x: torch.where(x > 1, x > 0, x < 0), UNKNOWN),
    "means of what is scattered": (
        lambda x, y: torch.ones(3, 3).scatter_reduce(1, y, x, "mean", include_self=False),
        torch.arange(9.0).reshape(3, 3),
        ints(0, 0, 1, 2, 2, 2, 0, 1, 1).reshape(3, 3),
    ),
    "means of what is scattered, and of what was there": (
        lambda x, y: torch.ones(3, 3).scatter_reduce(1, y, x, "mean"),
        torch.arange(9.0).reshape(3, 3),
        ints(0, 0, 1, 2, 2, 2, 0, 1, 1).reshape(3, 3),
    ),
    "cross entropy with label smoothing": (
        lambda x, y: functional.cross_entropy(x, y, label_smoothing=0.1),
        SCORES,
        ints(0, 2, -100),
    ),
    "cross entropy with weights and label smoothing": (
        lambda x, y: functional.cross_entropy(x, y, floats(1, 2, 3, 4), label_smoothing=0.1, reduction="none"),
        SCORES,
        ints(0, 2, 3),
    ),
    "cross entropy with probabilities": (
        functional.cross_entropy,
        SCORES,
        SCORES.flip(0).softmax(1),
    ),
    "gamma functions": (lambda x: (x.lgamma(), x.digamma()), floats(0.0, -0.0, 1e-3, 0.5, 2.3, 7.2, 40.5, -3.3, INF)),
    "quantiles": (lambda x: (x.erfinv(), torch.special.ndtri(x)), floats(1e-6, 0.01, 0.3, 0.5, 0.77, 1.0, 0.0, 1.5)),
    "tails of the normal distribution": (
        lambda x: (torch.special.log_ndtr(x), torch.special.erfcx(x)),
        floats(-30.0, -3.0, -0.2, 0.0, 0.7, 4.0, 30.0),
    ),
    "rounded to levels": (
        lambda x: (
            torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -128, 127),
            torch.fake_quantize_per_channel_affine(x, floats(0.1, 0.2, 0.3), ints(0, 5, 1).int(), 1, 0, 127),
        ),
        torch.arange(-6.0, 6.0).reshape(4, 3) / 3,
    ),
    "systems of equations": (
        lambda x, y: (
            x.inverse(),
            torch.linalg.solve(x, y),
            torch.linalg.solve_ex(x, y).result,
            torch.linalg.inv_ex(torch.cat([x, torch.ones(1, 2, 2)])).info > 0,
            *torch.linalg.slogdet(x),
            torch.linalg.cholesky(x @ x.mT),
            torch.linalg.cholesky_ex(x @ x.mT).L,
            torch.cholesky_inverse(x.tril() + 3 * torch.eye(2)),
            torch.linalg.inv_ex(x).inverse,
            *torch.linalg.qr(x),
            *torch.linalg.qr(x[0].repeat(2, 1), "complete"),
            torch.linalg.qr(x.triu(), "r").R,
            torch.linalg.solve_triangular(x, x.mT, upper=True),
        ),
        torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[0.0, 2.0], [-1.0, 1.0]], [[3.0, -1.0], [0.5, 2.0]]]),
        floats(1, 2, 3, 4, 5, 6).view(3, 2),
    ),
    "norms by the statistics of a batch, and of each row": (
        lambda x, mean: (
            functional.batch_norm(x, mean * 1, mean.abs() + 1, floats(0.5, 2), floats(1, -1), True, 0.3, 0.1),
            functional.batch_norm(
                x.flatten(0, 1)[None], mean.repeat(x.shape[0]), mean.repeat(x.shape[0]).abs(), training=True
            ),
        ),
        torch.arange(36.0).reshape(3, 2, 2, 3) % 7,
        floats(5, -3),
    ),
    "a vector that is returned as it is": (lambda x: (x.t(), x * 2), floats(1, 2, 3)),
    "a convolution for each row": (
        lambda x, y: functional.conv2d(x.flatten(0, 1)[None], y.flatten(0, 1), padding=1, groups=x.shape[0]),
        torch.arange(64.0).view(2, 2, 4, 4) % 7,
        torch.arange(108.0).view(2, 3, 2, 3, 3) % 5,
    ),
    "largest of values that are padded with zeros": (
        lambda x: (
            functional.max_pool2d(functional.pad(x, (1, 1, 1, 0)), 3, 2),
            functional.max_pool1d(functional.pad(x[0], (2, 0)).half(), 2).float(),
        ),
        -1 - torch.arange(48.0).reshape(2, 1, 4, 6) % 7,
    ),
    "numbers of two dtypes, by other names": (
        lambda x, n: (
            torch.less(x, n),
            torch.less_equal(n, x),
            torch.greater(n, x),
            torch.greater_equal(x, n),
            torch.pow(n, x.abs()),
        ),
        floats(1.5, 2, -0.5, 4),
        ints(2, 2, 3, -4),
    ),
    "cross entropy without a batch": (
        lambda x: functional.cross_entropy(x[0], ints(1)[0], label_smoothing=0.1),
        SCORES,
    ),
    "indices of 32 bits": (
        lambda x, y: (
            x[y],
            x[:, y],
            x[y, y],
            x.index_put((y,), x[:1], accumulate=True),
            x.clone().index_put_((y, y), x[0, 0]),
            x.half().index_put((y,), x[:1].half(), accumulate=True).float(),
            filled_with_zeros(x, y),
        ),
        SCORES.T,
        ints(0, 2).int(),
    ),
    "angles of complex numbers": (
        lambda x: (torch.view_as_complex(x).angle(), torch.view_as_real(torch.view_as_complex(x).log())),
        torch.cartesian_prod(floats(0.0, -0.0, 1.0, -1.0, NAN), floats(0.0, -0.0, 1.0, -2.0)),
    ),
    "inverse of as many matrices as they have rows": (
        lambda x: (torch.linalg.inv(x.expand(3, 3, 3)), torch.linalg.inv_ex(x.expand(3, 3, 3)).inverse, x.inverse()),
        torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.5], [0.0, 0.0, 4.0]])[None],
    ),
    "cross entropy of classes that cannot be, beside one with label smoothing": (
        lambda x, y: (
            functional.cross_entropy(x, y, label_smoothing=0.1),
            functional.cross_entropy(x.masked_fill(x > 1.9, -INF), y),
        ),
        SCORES,
        ints(0, 1, 2),
    ),
    "norms by the statistics of a batch, called by their own names": (
        lambda x: (
            torch.native_batch_norm(x, None, None, torch.zeros(2), torch.ones(2), True, 0.1, 1e-5)[0],
            *aten._native_batch_norm_legit.no_stats(x, floats(1, 2), floats(0, 1), True, 0.1, 1e-5),
            aten._native_batch_norm_legit_functional(x, None, None, floats(1, 2), floats(2, 3), True, 0.1, 1e-5)[4],
            torch.native_batch_norm(x, None, None, floats(1, 2), floats(2, 3), False, 0.1, 1e-5)[0],
        ),
        torch.arange(36.0).reshape(3, 2, 2, 3) ** 2 % 11,
    ),
    "any and all of bytes": (
        lambda x: (x.any(), x.all(), x.any(1), x.all(1), x.all(0, keepdim=True), (x > 0).all(1), x.int().all()),
        torch.tensor([[0, 3, 255], [2, 1, 7]], dtype=torch.uint8),
    ),
    "sign of a number in another dtype": (
        lambda x, y: (x.copysign(y), x.half().copysign(y), x.long().copysign(y.double()), y.copysign(-2.0)),
        floats(1.5, -2.0, 0.0),
        floats(-1.0, 2.0, -0.0),
    ),
    "images of bytes that are resized": (
        lambda x: (
            functional.interpolate(x, (5, 9), mode="bilinear"),
            functional.interpolate(x, (6, 10), mode="bicubic"),
            functional.interpolate(x, scale_factor=(0.7, 1.3), mode="bilinear"),
            functional.interpolate(x, (8, 10), mode="bilinear", antialias=True),
        ),
        (torch.arange(2 * 3 * 4 * 5) * 37 % 256).reshape(2, 3, 4, 5).to(torch.uint8),
    ),
    "what is scattered in half precision": (
        lambda x, y: (
            *(x.half().scatter_reduce(1, y, x.half(), how).float() for how in ("sum", "prod", "mean", "amax")),
            *(x.half().index_reduce(0, y[:, 0], x.half(), how).float() for how in ("prod", "mean", "amin")),
        ),
        torch.arange(9.0).reshape(3, 3),
        ints(0, 0, 1, 2, 2, 2, 0, 1, 1).reshape(3, 3),
    ),
    "masks and small integers that are sorted": (
        lambda x: (
            *x.gt(0).sort(dim=1, stable=True),
            x.gt(0).sort(1)[0],
            x.gt(0).msort(),
            x.gt(0).argsort(dim=1, stable=True, descending=True),
            x.gt(0).to(torch.uint8).argsort(dim=1, stable=True),
            x.to(torch.int16).sort(1)[0],
        ),
        SCORES,
    ),
    "powers of integers with masks": (lambda x: (x ** (x > 0), x ** (x > 0).to(torch.uint8)), ints(3, -2, 0, 5)),
    "products and limits of small integers": (
        lambda x: (
            x.to(torch.int8) @ x.to(torch.int8).T,
            x.to(torch.int16) @ x.to(torch.int16).T,
            x.to(torch.int16).amax(1),
            x.to(torch.int16).amin(),
            x.to(torch.int16).argmax(1),
            x.to(torch.int16).clamp(-1, 3),
            x.to(torch.int16).minimum(x.to(torch.int16).flip(0)),
            x.to(torch.int16).maximum(x.to(torch.int16).flip(0)),
            x.to(torch.int16).maximum(x.flip(0) * 2**40),
            functional.max_pool2d(x.int()[None, None], 2, 1),
        ),
        ints(7, -3, 2, 5, 0, -9).view(2, 3),
    ),
    "complex division": (
        lambda x, y: tuple(
            torch.view_as_real(torch.view_as_complex(one) / torch.view_as_complex(other))
            for one, other in ((x, y), (x * 1e-30, y * 1e-30), (x * 1e30, y * 1e30))
        ),
        floats(3, 4, -1, 2, 8, 0).view(3, 2),
        floats(4, 2, 0, 2, 2, -2).view(3, 2),
    ),
    "complex powers": (
        lambda x: (
            torch.view_as_real(torch.view_as_complex(x) ** 2.0),
            torch.view_as_real(torch.view_as_complex(x) ** 1),
        ),
        floats(1, 2, -3, 0, 0.5, -4).view(3, 2),
    ),
    "shares of rows beside nothing": (
        lambda x: (
            torch.baddbmm(torch.full((2, 2, 2), NAN), x, x, beta=0),
            torch.addmm(torch.full((2, 2), NAN), x[0], x[1], beta=0),
        ),
        torch.arange(8.0).reshape(2, 2, 2),
    ),
    "determinants of matrices that are singular": (
        lambda x: (*torch.linalg.slogdet(x), x.logdet()),
        floats(1, 2, 2, 4, 0, 0, 0, 0, 2, 0, 0, 3).view(3, 2, 2),
    ),
    "triangular equations with a common right side": (
        lambda x, y: torch.linalg.solve_triangular(x, y, upper=False, unitriangular=True),
        floats(1, 0, 2, 1, 1, 0, -3, 1).view(2, 2, 2),
        floats(1, 2, 3, 4).view(2, 2),
    ),
    "powers of integers beyond 64": (
        lambda x, y: (x**y, x**70),
        ints(0, 1, -1, 2, 2, -6, -2, -1),
        ints(64, 100, 65, 64, 70, 64, 100, 66),
    ),
    "places of a number": (
        lambda x, y: (
            torch.searchsorted(x, 2.5),
            torch.searchsorted(x, 3, right=True),
            torch.bucketize(2.5, x),
            torch.isin(x, 3.0),
            torch.isin(3.0, x, invert=True),
            x.scatter(0, y, x, reduce="add"),
            x.scatter(0, y, x, reduce="multiply"),
            x.scatter(0, y, 2.0, reduce="add"),
            *x[0].topk(1),
        ),
        floats(1, 3, 4),
        ints(2, 0, 0),
    ),
    "complex roots, elements and NaN": (
        lambda x: (
            torch.view_as_real(torch.view_as_complex(x).gather(0, ints(1, 0))),
            torch.view_as_complex(x).isnan(),
            torch.view_as_real(torch.view_as_complex(x).sqrt()),
        ),
        floats(3, 4, -4, 0, -4, -0.0, 0, 2, 0, 0, NAN, 1, 0, -8).view(7, 2),
    ),
}


def resized(x, size, factors=None, **options):
    return functional.interpolate(x[None, None], size, factors, **options)


# Sizes: the functions of a tensor whose first axis has any size, at several of them.
SIZES = {
    "mean of nothing": (lambda x: (x.mean(0), x.mean(), x.mean((0, 1), keepdim=True)), (3, 5, 0)),
    "axis that is not removed": (lambda x: (x.squeeze(0), x.squeeze(), x.squeeze((0, 1))), (3, 5)),
    "range with a fractional step": (lambda x: torch.arange(0, 1, 1 / x.shape[0]), (7, 100, 49)),
    "range down": (lambda x: torch.arange(x.shape[0], -1, -2), (7, 10)),
    "rounded up by two negations": (lambda x: x[: -(-x.shape[0] // 2)] * (-x.shape[0] // 3), (7, 10, 100)),
    "remainder of a negative size": (lambda x: x + (-x.shape[0]) % 3, (7, 10)),
    "rounded to even": (lambda x: x[: round(x.shape[0] / 2)], (5, 7, 10)),
    "share that is rounded down": (lambda x: x[: math.floor(x.shape[0] * 0.29)], (7, 100)),
    "square roots": (lambda x: (x / x.shape[0] ** 0.5, x * torch.sym_sqrt(x.shape[0])), (7, 100)),
    "nearest pixels": (
        lambda x: functional.interpolate(x[None, None], scale_factor=1.7, mode="nearest-exact"),
        (5, 11),
    ),
    "nearest pixels of a size": (
        lambda x: functional.interpolate(x[None, None], (13, 5), mode="nearest-exact"),
        (5, 11),
    ),
    "pixels below": (lambda x: resized(x, (7, 9)), (21, 49, 91)),
    "pixels below of a sequence": (lambda x: functional.interpolate(x.T[None], 10), (2, 35, 65)),
    "pixels below, by a factor": (lambda x: resized(x, None, (1.3, 2)), (2, 90, 170)),
    "pixels between": (lambda x: resized(x, None, (1.3, 1), mode="bilinear"), (1, 2, 90)),
    "pixels between, in cubic form": (lambda x: resized(x, None, (0.7, 1), mode="bicubic"), (5, 90)),
    "elements between": (lambda x: functional.interpolate(x.T[None], scale_factor=1.3, mode="linear"), (2, 90)),
    "several pixels each": (lambda x: resized(x, None, (0.6, 0.7), mode="bilinear", antialias=True), (10, 90)),
    "mean of numbers that add up to 0": (lambda x: (x - (x.numel() - 1) / 2).mean((0, 1)), (3, 7, 13)),
    "bits of a size": (lambda x: x[: x.shape[0] & ~1] * (x.shape[0] | 1), (7, 10)),
    "shifted sizes": (lambda x: x[: x.shape[0] >> 1] * (x.shape[0] << 2), (7, 10)),
    "halves": (lambda x: (*x.chunk(2), *x.chunk(3)), (10, 12)),
    "parts of half the length": (lambda x: torch.sub(*x.split(x.shape[0] // 2)), (10, 12)),
    "parts of a static axis": (lambda x: (*x.split(2, 1), *x.tensor_split(3, 1), *x.chunk(3, 1)), (3, 5)),
}


@pytest.mark.parametrize("name", CASES)
def test_onnxruntime_computes_what_torch_computes(name):
    function, *tensors = CASES[name]

    check(exported(function, *tensors), function, *tensors)


def test_functions_of_weights_are_computed_before_the_translation():
    layer = torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(3, 3))  # by the exponential of a matrix

    scores = SCORES.T.contiguous()

    check(exported(layer, scores), layer, scores)


def test_functions_of_weights_have_names_of_their_own():
    weight = torch.nn.Parameter(torch.randn(3, 3))
    layers = torch.nn.Sequential(*[torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3)) for _ in "abc"])

    def normalised(x):
        return torch.nn.functional.normalize(layers(x)) @ torch.nn.functional.normalize(weight)

    model = Operator(normalised)
    model.layers = layers
    scores = SCORES.T.contiguous()
    check(exported(model, scores), model, scores)


def test_a_program_is_translated_twice():
    program = torch.export.export(Operator(lambda x: x[x > 0].cumsum(0)), (SCORES,))

    first, second = (onnx_program(program).model_proto.graph for _ in range(2))
    assert len(first.node) == len(second.node)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_computed_as_in_python(name):
    function, sizes = SIZES[name]
    session = exported(function, torch.arange(50.0).reshape(10, 5))

    for size in sizes:
        check(session, function, torch.arange(size * 5.0).reshape(size, 5), rtol=1e-5)


@pytest.mark.parametrize("kind", ["boolean", "infinite"])
def test_attention_is_zero_for_a_query_that_sees_no_key(kind):
    shown = torch.tensor([False, False, True, True]).repeat(2, 1, 3, 1)
    shown[:, :, 0] = False
    mask = shown if kind == "boolean" else torch.zeros(shown.shape).masked_fill(~shown, -INF)
    query = torch.randn(2, 2, 3, 8)

    def attention(query, mask):
        return functional.scaled_dot_product_attention(
            query, query[:, :, [0, 1, 2, 0]], query[:, :, [2, 1, 0, 0]], mask
        )

    (found,) = exported(attention, query, mask).run(None, {"tensors_0": query.numpy(), "tensors_1": mask.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), attention(query, mask))
    assert not found[:, :, 0].any()


INDEXED = {
    "embedding": lambda x, index: functional.embedding(index, x),
    "picked": lambda x, index: x.gather(0, index[:, None]),
    "selected": lambda x, index: x.index_select(0, index.clone()),
    "added": lambda x, index: x.index_add(0, index, x[:3] * 2),
}


@pytest.mark.parametrize("name", INDEXED)
def test_indices_that_torch_refuses_are_refused(name):
    function, x = INDEXED[name], torch.arange(12.0).reshape(6, 2)
    session = exported(function, x, ints(1, 5, 0))

    check(session, function, x, ints(3, 3, 5))
    for index in (ints(0, -1, 2), ints(0, 6, 2)):
        with pytest.raises((IndexError, RuntimeError)):
            function(x, index)
        feeds = {value.name: tensor.numpy() for value, tensor in zip(session.get_inputs(), (x, index), strict=True)}
        with pytest.raises(Exception, match=r"INVALID_ARGUMENT|RUNTIME_EXCEPTION|FAIL"):
            session.run(None, feeds)


@pytest.mark.parametrize(("first", "sizes", "wrong"), [(0, (1, 4), 5), (-3, (3, 4), 2), (-3, (3, 4), 5)])
def test_a_range_of_rows_does_not_leave_the_table(first, sizes, wrong):
    def rows(x):
        return functional.embedding(torch.arange(first and x.shape[0] + first, x.shape[0]), SCORES.view(4, 3))

    session = exported(rows, torch.zeros(3))
    for size in sizes:
        check(session, rows, torch.zeros(size))
    with pytest.raises(IndexError):
        rows(torch.zeros(wrong))
    with pytest.raises(Exception, match="INVALID_ARGUMENT"):
        session.run(None, {session.get_inputs()[0].name: torch.zeros(wrong).numpy()})


def test_indices_that_are_counted_are_not_checked():
    program = torch.export.export(Operator(lambda x: x.gather(1, x.argmax(1, keepdim=True))), (SCORES,))
    assert "Less" not in {node.op_type for node in onnx_program(program).model_proto.graph.node}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.group_norm(x, 2, weight=floats(1, 2, 3, 4), bias=floats(0.1, 0.2, 0.3, 0.4)),
        lambda x: functional.group_norm(x, 4),
        lambda x: functional.instance_norm(x, weight=floats(1, 2, 3, 4)),
    ],
    ids=["two groups", "a group for each channel", "instances"],
)
@pytest.mark.parametrize("length", [2, 256, 999, 32000])
def test_padded_sequences_are_normalised_as_precisely_as_in_torch(function, length):
    sounds = 0.1 * torch.randn(3, 4, length, generator=torch.Generator().manual_seed(0))
    sounds[:, :, length // 2 :] = 0.0013  # what a convolution makes of padding
    session = exported(function, sounds)
    (found,) = session.run(None, {session.get_inputs()[0].name: sounds.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), function(sounds), rtol=0, atol=1e-5)


def test_instance_norms_of_images_stay_one_operator():
    program = torch.export.export(Operator(functional.instance_norm), (torch.randn(2, 4, 5, 5),))
    kinds = [node.op_type for node in onnx_program(program).model.graph]
    assert "InstanceNormalization" in kinds
    assert "Reshape" not in kinds


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_arithmetic_with_numbers_that_follow_from_sizes(dtype):
    def computed(x):
        half, places = (x.shape[0] - 1) / 2, torch.arange(1, 5, dtype=dtype)
        both = half - places, places - half, places * half, places // (half + 1), torch.sub(places, x.shape[0], alpha=2)
        return *both, x.shape[0] ** places, half**places

    session = exported(computed, torch.zeros(6))
    for length in (2, 5, 9):
        check(session, computed, torch.zeros(length))
