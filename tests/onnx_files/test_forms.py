"""Operators at values where the form that torch.onnx writes computes other numbers: onnxruntime computes torch's."""

import math

import onnxruntime
import pytest
import torch

from exportkit.onnx_files.translate import onnx_program

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

CASES = {
    "floor division of integers": (lambda x: torch.div(x, 3, rounding_mode="floor"), LARGE),
    "floor division by a negative integer": (lambda x: torch.div(x, -3, rounding_mode="floor"), LARGE),
    "truncating division of integers": (lambda x: torch.div(x, 3, rounding_mode="trunc"), LARGE),
    "floor division of numbers": (lambda x: torch.div(x, 0.1, rounding_mode="floor"), floats(1.0, -1.0, 0.3, 9e7, INF)),
    "floor division operator": (lambda x, y: x // y, floats(1.0, -1.0, 5.0, 5.0), floats(0.1, 0.1, 0.0, -3.0)),
    "remainder": (lambda x: x % 0.7, ODD),
    "remainder by a negative number": (lambda x: x % -0.7, ODD),
    "remainder of integers": (lambda x: x % -3, LARGE),
    "log1p": (torch.log1p, SMALL.clamp(min=-0.5)),
    "expm1": (torch.expm1, SMALL),
    "log of a sigmoid": (torch.nn.functional.logsigmoid, FAR),
    "log of a sum of exponentials": (torch.logaddexp, FAR, FAR.flip(0)),
    "log of a sum, same values": (torch.logaddexp, FAR, FAR),
    "log of a sum of powers of two": (torch.logaddexp2, FAR, FAR.flip(0)),
    "binary cross entropy": (
        lambda x, y: torch.nn.functional.binary_cross_entropy_with_logits(x, y, reduction="none"),
        floats(-114.0, 114.0, 5.0, -5.0),
        floats(1.0, 0.0, 0.5, 0.0),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_onnxruntime_computes_what_torch_computes(name):
    function, *tensors = CASES[name]

    check(exported(function, *tensors), function, *tensors)
