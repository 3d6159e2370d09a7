"""Dtypes, complex numbers, quantised layers, tied and computed weights."""

import torch
from cases import case, ints, randn
from torch import nn

ROWS, MORE_ROWS = [(2, 5), (3, 8)], [(1, 6), (4, 12)]


def _mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def _in_dtype(dtype):
    model = _mlp().to(dtype)
    return model, lambda rows, steps: model(randn(rows, steps, 6).to(dtype))


@case(ROWS, MORE_ROWS)
def double_precision():
    return _in_dtype(torch.float64)


@case(ROWS, MORE_ROWS)
def half_precision():
    return _in_dtype(torch.float16)


@case(ROWS, MORE_ROWS)
def brain_floats():
    return _in_dtype(torch.bfloat16)


@case(ROWS, MORE_ROWS)
def brain_floats_inside():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = _mlp().to(torch.bfloat16)

        def forward(self, x):
            return self.net(x.to(torch.bfloat16)).float()

    model = Inside()
    return model, lambda rows, steps: model(randn(rows, steps, 6))


@case(ROWS, MORE_ROWS)
def convolutions_in_brain_floats():
    model = nn.Sequential(nn.Conv1d(6, 8, 3, padding=1), nn.SiLU(), nn.GroupNorm(2, 8)).to(torch.bfloat16)
    return model, lambda rows, steps: model(randn(rows, 6, steps).to(torch.bfloat16))


@case(ROWS, MORE_ROWS)
def integers_of_eight_bits():
    class Normalised(nn.Module):
        def forward(self, image):
            return (image.float() / 255 - 0.5) / 0.25, (image > 128).sum(-1)

    model = Normalised()
    return model, lambda rows, steps: model(torch.randint(0, 256, (rows, steps, 3), dtype=torch.uint8))


@case(ROWS, MORE_ROWS)
def weights_in_eight_bits():
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            weight = randn(8, 6)
            scale = weight.abs().amax(1, keepdim=True) / 127
            self.register_buffer("weight", (weight / scale).round().to(torch.int8))
            self.register_buffer("scale", scale)

        def forward(self, x):
            return nn.functional.linear(x, self.weight.float() * self.scale)

    model = Quantised()
    return model, lambda rows, steps: model(randn(rows, steps, 6))


@case(ROWS, MORE_ROWS)
def weights_in_four_bits():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("packed", torch.randint(0, 256, (8, 3), dtype=torch.uint8))

        def forward(self, x):
            low, high = self.packed & 15, self.packed >> 4
            weight = torch.stack([low, high], -1).flatten(1).to(torch.int8) - 8
            return nn.functional.linear(x, weight.float() * 0.1)

    model = Packed()
    return model, lambda rows, steps: model(randn(rows, steps, 6))


@case(ROWS, MORE_ROWS)
def activations_in_eight_bits():
    class Activations(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 8)

        def forward(self, x):
            return torch.fake_quantize_per_tensor_affine(self.layer(x), 0.05, 0, -128, 127)

    model = Activations()
    return model, lambda rows, steps: model(randn(rows, steps, 6))


@case(ROWS, MORE_ROWS)
def dynamically_quantised():
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), {nn.Linear}, torch.qint8)
    return model, lambda rows, steps: model(randn(rows, steps, 6))


@case(ROWS, MORE_ROWS)
def complex_layer():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.real, self.imaginary = nn.Linear(6, 8), nn.Linear(6, 8)

        def forward(self, x):
            z = torch.complex(self.real(x), self.imaginary(x)) * (1 + 2j)
            return z.abs(), z.angle(), (z * z.conj()).real

    model = Complex()
    return model, lambda rows, steps: model(randn(rows, steps, 6))


@case(ROWS, MORE_ROWS)
def complex_input():
    class Complex(nn.Module):
        def forward(self, z):
            return torch.view_as_real(z * torch.exp(1j * z.real)).sum(-1)

    model = Complex()
    return model, lambda rows, steps: model(torch.complex(randn(rows, steps), randn(rows, steps)))


@case(ROWS, MORE_ROWS)
def tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
            self.head.weight = self.words.weight

        def forward(self, tokens):
            return self.head(self.words(tokens))

    model = Tied()
    return model, lambda rows, steps: model(ints(rows, steps))


@case(ROWS, MORE_ROWS)
def low_rank_adapters():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.down, self.up = nn.Linear(6, 8), nn.Parameter(randn(2, 6)), nn.Parameter(randn(8, 2))

        def forward(self, x):
            return self.base(x) + x @ (self.up @ self.down).T * 0.5

    model = Adapted()
    return model, lambda rows, steps: model(randn(rows, steps, 6))


@case(ROWS, MORE_ROWS)
def weights_by_normalisation():
    from torch.nn.utils.parametrizations import orthogonal, weight_norm

    model = nn.Sequential(weight_norm(nn.Linear(6, 8)), orthogonal(nn.Linear(8, 8)))
    return model, lambda rows, steps: model(randn(rows, steps, 6))


@case(ROWS, MORE_ROWS)
def solved_equations():
    class Solved(nn.Module):
        def forward(self, a, b):
            positive = a @ a.transpose(-1, -2) + torch.eye(4)
            return torch.linalg.solve(positive, b), torch.linalg.det(positive)

    model = Solved()
    return model, lambda rows, steps: model(randn(rows, 4, 4), randn(rows, 4, steps))


@case(ROWS, MORE_ROWS)
def factor_of_cholesky():
    class Factor(nn.Module):
        def forward(self, a):
            return torch.linalg.cholesky(a @ a.transpose(-1, -2) + 4 * torch.eye(4))

    model = Factor()
    return model, lambda rows, steps: model(randn(rows, steps, 4, 4))


@case(ROWS, MORE_ROWS)
def scripted():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).relu()

    model = torch.jit.script(Gate())
    return model, lambda rows, steps: model(randn(rows, steps, 6))


@case(ROWS, MORE_ROWS)
def function_that_is_vectorised():
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 8)

        def forward(self, x):
            return torch.vmap(lambda row: self.layer(row).sum(0))(x)

    model = Mapped()
    return model, lambda rows, steps: model(randn(rows, steps, 6))


@case(ROWS, MORE_ROWS)
def gradient_in_the_model():
    class Score(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x):
            return torch.func.grad(lambda value: self.energy(value).sum())(x)

    model = Score()
    return model, lambda rows, steps: model(randn(rows, steps, 6))
