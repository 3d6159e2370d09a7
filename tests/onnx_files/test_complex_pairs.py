"""Operators that move complex numbers around are written as ones that move pairs of reals, which torch.onnx knows."""

import onnx
import pytest
import torch

import exportkit
from exportkit.onnx_files.complex_numbers import with_complex_as_pairs
from tests.arguments.generative import TEXT, padded_left

MOVES = {
    "unsqueeze": lambda z: z.unsqueeze(1),
    "unsqueeze at the end": lambda z: z.unsqueeze(-1),
    "None in an index": lambda z: z[:, None, :, None],
    "select": lambda z: z[:, 1],
    "select at the end": lambda z: z[..., -1],
    "expand": lambda z: z[:, None].expand(-1, 3, -1, -1),
    "expand_as": lambda z: z[0].expand_as(z),
    "broadcast_to": lambda z: z[:1].broadcast_to(z.shape),
    "repeat": lambda z: z.repeat(2, 1, 2, 1),
    "tile": lambda z: z.tile(2),
    "rows": lambda z: z[torch.tensor([[1, 0], [1, 1]])],
    "columns": lambda z: z[:, torch.tensor([1, 0, 1])],
    "rows and columns": lambda z: z.mT[torch.tensor([1, 0]), :, torch.tensor([0, 1])],
    "index_select": lambda z: z.index_select(-1, torch.tensor([1, 0])),
    "split": lambda z: z.split(3, dim=-1)[1],
    "split in sizes": lambda z: torch.cat(z.split([1, 3], -1)[::-1], -1),
    "chunk": lambda z: z.chunk(2, -1)[1],
    "unbind": lambda z: z.unbind(-1)[1],
    "several": lambda z: z.mT.unsqueeze(-1)[:, 2] * z[:, :, None, 0].expand(-1, -1, 1),
}


class Moves(torch.nn.Module):
    """Moves complex numbers, and takes and returns pairs."""

    def __init__(self, moves):
        super().__init__()
        self.moves = moves

    def forward(self, x):
        real = x.unsqueeze(1).expand(-1, 2, -1, -1, -1)[:, 1]
        return [torch.view_as_real(move(torch.view_as_complex(real))) for move in self.moves]


class Writes(torch.nn.Module):
    """Writes to a view of a complex tensor."""

    def forward(self, x):
        z = torch.view_as_complex(x).clone()
        z[:, 0] = z[:, 1]
        return torch.view_as_real(z)


FUNCTIONS = [
    lambda x, z: x + 0.0j,
    lambda x, z: (1 + 2j) - x,
    lambda x, z: x.long() + 1j,
    lambda x, z: torch.exp(-1j * x),
    *(lambda x, z, e=exponent: z**e for exponent in (0, 0.5, -0.5, 2, -1, -3, 1.5)),
    lambda x, z: (2 + 1j) ** x,
    lambda x, z: z**x,
    *(
        lambda x, z, function=function: function(z)
        for function in (
            torch.square,
            torch.rsqrt,
            torch.log1p,
            torch.sin,
            torch.cos,
            torch.sinh,
            torch.cosh,
            torch.tanh,
            torch.sigmoid,
            torch.sgn,
            torch.tril,
            torch.triu,
            torch.isfinite,
            torch.reciprocal,
        )
    ),
    lambda x, z: torch.tanh(300 * z),
    lambda x, z: torch.sigmoid(-10 * z).log(),
    lambda x, z: torch.log1p(1e-6 * z) * 1e6,
    lambda x, z: (x * 0) ** (1 + 1j) + x.long() ** (0.5 + 1j),
    lambda x, z: torch.nn.functional.pad(z, (1, 2), value=1.5) + x.double().sum(),
    lambda x, z: torch.nn.functional.silu(z),
    lambda x, z: torch.sgn(torch.zeros_like(z)),
    lambda x, z: torch.addcmul(z, z, z.conj(), value=0.5),
    lambda x, z: torch.addcdiv(z, z, z.conj() + 2, value=0.5),
    lambda x, z: torch.lerp(z, z.conj(), 0.3),
    lambda x, z: torch.linalg.vector_norm(z, dim=-1),
    lambda x, z: torch.linalg.vector_norm(z, 1),
    lambda x, z: torch.vdot(z[0], z[-1]),
    lambda x, z: z.var(-1),
    lambda x, z: z.std(unbiased=False),
    lambda x, z: z != z.real + 1j,
    lambda x, z: z[x > 0],
    lambda x, z: torch.zeros_like(z).index_add(1, torch.tensor([0, 1]), z[:, :2]),
    lambda x, z: torch.zeros_like(z).scatter_add(1, x.argsort(1), z),
]


class Functions(torch.nn.Module):
    """Computes functions of complex numbers."""

    def forward(self, x):
        z = torch.complex(x, x.flip(-1))
        found = [function(x, z) for function in FUNCTIONS]
        return [torch.view_as_real(y.resolve_conj()) if y.is_complex() else y for y in found]


def program_of(model):
    return torch.export.export(model, (torch.randn(3, 5, 4, 2),), dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}})


@pytest.mark.parametrize("name", MOVES)
def test_pairs_move_as_complex_numbers_do(name):
    model, x = Moves([MOVES[name]]), torch.randn(2, 5, 4, 2)
    moved = with_complex_as_pairs(program_of(model)).module()(x)
    assert torch.equal(*moved, *model(x))


@pytest.mark.runtime
def test_functions_of_complex_numbers_have_an_onnx_form(tmp_path):
    model, observer = Functions(), exportkit.InputObserver()
    with observer(model):
        for shape in ((2, 5), (3, 7)):
            model(torch.randn(shape))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    report = onnx_model.verify()
    assert report.ok, str(report)
    x = 2 * torch.randn(4, 6)
    torch.testing.assert_close(onnx_model(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.runtime
def test_complex_numbers_that_are_moved_have_an_onnx_form(tmp_path):
    model, observer = Moves(list(MOVES.values())), exportkit.InputObserver()
    with observer(model):
        for batch, length in ((2, 5), (3, 7)):
            model(torch.randn(batch, length, 4, 2))
    report = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)


class Multiplies(torch.nn.Module):
    """Multiplies complex numbers by complex weights."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (torch.nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat)) for _ in range(2))
        self.layer = torch.nn.Linear(4, 3, dtype=torch.cfloat)

    def forward(self, x):
        z = torch.fft.fft(x)
        found = [
            torch.einsum("bij,jk,kl->bil", z, self.one, self.other),
            torch.tensordot(z, self.one.detach(), dims=([2], [0])),
            self.layer(z),
            torch.outer(z[:, 0, 0], self.one[0]),
            torch.mv(z[0], self.one[0]),
        ]
        real = torch.einsum("ij,jk,kl->il", x[0], self.one.real, self.other.real)
        return [*map(torch.view_as_real, found), real, z[0, 0].dot(self.one[0]).abs()]


@pytest.mark.runtime
def test_products_with_complex_weights_have_an_onnx_form(tmp_path):
    model, observer = Multiplies(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, length in ((2, 5), (3, 7)):
            model(torch.randn(batch, length, 4))
    report = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)


class Spectral(torch.nn.Module):
    """A layer as Fourier neural operators have it; complex weights of several such layers."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4, 3, dtype=torch.cfloat))

    def forward(self, x):
        found = torch.zeros(x.shape[0], 4, x.shape[-1] // 2 + 1, dtype=torch.cfloat)
        found[:, :, :3] = torch.einsum("bix,iox->box", torch.fft.rfft(x)[:, :, :3], self.weight)
        return torch.fft.irfft(found, n=x.shape[-1]).tanh() + x


@pytest.mark.runtime
def test_layers_with_complex_weights_are_translated(tmp_path):
    model = torch.nn.Sequential(*[Spectral() for _ in range(3)])
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, length in ((2, 16), (3, 24)):
            model(torch.randn(batch, 4, length))
    report = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)


class Frequencies(torch.nn.Module):
    """Reconstructs images from a part of their frequencies, and returns the frequencies of the result, too."""

    def __init__(self):
        super().__init__()
        self.refine = torch.nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, frequencies, mask):
        image = torch.view_as_real(torch.fft.ifft2(frequencies * mask, norm="ortho"))
        image = torch.view_as_complex(self.refine(image.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).contiguous())
        return {"image": image.abs(), "frequencies": torch.fft.fft2(image, norm="ortho"), "conjugate": image.conj()}


@pytest.mark.runtime
def test_complex_inputs_and_outputs_are_pairs_in_the_file_alone(tmp_path):
    def call(batch, side):
        mask = (torch.rand(batch, side, 8) > 0.5).float()
        return torch.randn(batch, side, 8, dtype=torch.cfloat), mask

    torch.manual_seed(0)
    model, observer = Frequencies().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model(*call(2, 8))
        model(*call(3, 12))
    exportkit.export(model, observer).save(tmp_path / "model", verify=False)
    graph = exportkit.load(tmp_path / "model")
    report = graph.verify()
    assert report.ok, str(report)
    file = onnx.load(graph.path).graph
    axes = [len(value.type.tensor_type.shape.dim) for value in (*file.input, *file.output)]
    assert axes == [4, 3, 3, 4, 4]
    for given in (call(1, 9), call(4, 10)):
        frequencies, mask = given
        for first in (frequencies, frequencies.conj()):
            with torch.no_grad():
                torch.testing.assert_close(graph(first, mask), model(first, mask), atol=1e-5, rtol=1e-4)


def test_what_is_written_to_a_view_is_written():
    x = torch.randn(2, 5, 4, 2)
    program = with_complex_as_pairs(program_of(Writes()))
    assert torch.equal(program.module()(x)[:, 0], x[:, 1])
    assert torch.equal(program.module()(x)[:, 1:], x[:, 1:])


def test_the_program_itself_is_left_as_it_was():
    before = program_of(Moves([MOVES["unsqueeze"]]))
    text = str(before.graph)
    after = with_complex_as_pairs(before)
    assert str(before.graph) == text != str(after.graph)
    assert with_complex_as_pairs(after) is after


def test_a_program_that_moves_no_complex_numbers_is_returned_as_it_is():
    plain = program_of(Moves([lambda z: z * z]))
    assert with_complex_as_pairs(plain) is plain


@pytest.mark.runtime
@pytest.mark.parametrize("family", ["Llama4Text", "DeepseekV2"])
def test_rotary_embeddings_of_complex_numbers_are_proven(family, tmp_path):
    import transformers

    own = {
        "Llama4Text": {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 6}
        | {"no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"]},
        "DeepseekV2": {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
        | {"v_head_dim": 8, "first_k_dense_replace": 2, "num_key_value_heads": 4},
    }
    config = getattr(transformers, f"{family}Config")(**{**TEXT, **own[family]})
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    observer = exportkit.InputObserver()
    with observer(model, store_n_calls=3), torch.no_grad():
        model.generate(**padded_left(7), max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    exported = exportkit.export(model, observer)
    assert "transformers' own export patches" not in exported.rules
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)
