"""Like layers: only the first few are traced, and the program does not change."""

import pytest
import torch
import transformers

import exportkit
from exportkit.programs.copied_layers import CopiedLayers

LAYERS = 12
traced = []


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        if torch.compiler.is_exporting():
            traced.append(self)
        return x + self.inner(x).relu()


class Deep(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layers = torch.nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def deep(layer=Layer):
    model, observer = Deep(layer).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch in (2, 3):
            model(torch.randn(batch, 8))
    return model, observer


class Signed(Layer):
    """One of these layers has a zero of the other sign."""

    def __init__(self):
        super().__init__()
        self.zero = 0.0

    def forward(self, x):
        return super().forward(x) + x.abs().copysign(torch.full_like(x, self.zero))


def decoder(config):
    torch.manual_seed(0)
    model, observer = transformers.AutoModelForCausalLM.from_config(config).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, length in ((2, 7), (3, 9)):
            ids = torch.randint(3, 99, (batch, length))
            past = model(input_ids=ids, attention_mask=torch.ones_like(ids)).past_key_values
            mask = torch.ones(batch, length + 1, dtype=torch.int64)
            model(input_ids=ids[:, :1], attention_mask=mask, past_key_values=past)
    return model, observer


def without_copies(monkeypatch):
    monkeypatch.setattr(CopiedLayers, "call", lambda *args: args[-1](*args[4], **args[5]))


def rows(program):
    """What each node computes, of what, with which shape, and in which module."""
    numbers = {node: number for number, node in enumerate(program.graph.nodes)}

    def plain(value):
        return f"node {numbers[value]}" if isinstance(value, torch.fx.Node) else value

    return [
        (
            str(node.target) if node.op == "call_function" else node.op,
            str(torch.fx.node.map_aggregate((node.args, node.kwargs), plain)),
            str(getattr(node.meta.get("val"), "shape", None)),
            [path for path, _ in node.meta.get("nn_module_stack", {}).values()],
        )
        for node in numbers
    ]


def test_the_first_layers_are_traced():
    model, observer = deep()
    traced.clear()
    program = exportkit.export(model, observer).program
    assert len(traced) == 2
    x = torch.randn(5, 8)
    torch.testing.assert_close(program.module()(x=x), model(x))


def test_layers_that_pass_an_argument_on_are_copied(tmp_path):
    class Biased(Layer):
        def forward(self, x, bias):
            return super().forward(x) + bias, bias

    class Passing(Deep):
        def forward(self, x):
            bias = x.sin()
            for layer in self.layers:
                x, bias = layer(x, bias)
            return x

    model, observer = Passing(Biased).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch in (2, 3):
            model(torch.randn(batch, 8))
    traced.clear()
    exported = exportkit.export(model, observer)
    assert len(traced) == 2
    assert exported.to_onnx(tmp_path / "model.onnx").verify().ok


class LooksUp(Layer):
    """A layer that looks its number up in a table, and writes into it."""

    number = 0

    def forward(self, x, table):
        if table.get(self.number):
            x = x.sin()
        table[self.number] = True
        return super().forward(x)


class WithTable(Deep):
    """Its layers share a table with an item for each."""

    before = frozenset()

    def __init__(self):
        super().__init__(LooksUp)
        for number, layer in enumerate(self.layers):
            layer.number = number

    def forward(self, x):
        table = {number: number in self.before for number in range(LAYERS)}
        for layer in self.layers:
            x = layer(x, table=table)
        return x if all(table.values()) and {*map(type, table)} == {int} else -x


@pytest.mark.parametrize(("before", "most"), [((), 2), ((7,), 3), ((0, 4, 5, 6), 6), (range(LAYERS), 2)])
def test_layers_are_copied_that_find_the_same_by_their_number(before, most, tmp_path):
    model, observer = WithTable().eval(), exportkit.InputObserver()
    model.before = frozenset(before)
    with observer(model), torch.no_grad():
        for batch in (2, 3):
            model(torch.randn(batch, 8))
    traced.clear()
    exported = exportkit.export(model, observer)
    assert len(traced) <= most
    assert exported.to_onnx(tmp_path / "model.onnx").verify().ok


def test_a_layer_with_another_zero_is_traced():
    model, observer = deep(Signed)
    model.layers[7].zero = -0.0
    x = torch.randn(5, 8)
    torch.testing.assert_close(exportkit.export(model, observer).program.module()(x=x), model(x))


def test_copies_belong_to_the_modules_of_their_layers():
    model, observer = deep()
    nodes = exportkit.export(model, observer).program.graph.nodes
    products = [node for node in nodes if node.target is torch.ops.aten.linear.default]
    weights = [node.args[1].name for node in products]
    assert weights == [f"p_layers_{number}_inner_weight" for number in range(LAYERS)]
    paths = [list(node.meta["nn_module_stack"].values())[-1][0] for node in products]
    assert paths == [f"layers.{number}.inner" for number in range(LAYERS)]


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(num_hidden_layers=6, **SIZES),
        transformers.MixtralConfig(num_hidden_layers=5, num_local_experts=3, **SIZES),
        transformers.Gemma3TextConfig(num_hidden_layers=8, sliding_window=8, **SIZES),
    ],
    ids=lambda config: config.model_type,
)
def test_the_program_is_that_of_a_trace_of_all_layers(config, monkeypatch):
    model, observer = decoder(config)
    copied = exportkit.export(model, observer).program
    without_copies(monkeypatch)
    program = exportkit.export(model, observer).program
    assert rows(copied) == rows(program)
    assert str(copied.range_constraints) == str(program.range_constraints)


@pytest.mark.slow
def test_layers_with_scans_are_copied(tmp_path):
    config = transformers.Mamba2Config(
        hidden_size=32,
        num_hidden_layers=6,
        num_heads=4,
        head_dim=16,
        n_groups=1,
        state_size=8,
        vocab_size=100,
        chunk_size=8,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model, observer = transformers.AutoModelForCausalLM.from_config(config).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model.generate(torch.randint(3, 99, (2, 7)), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    exported = exportkit.export(model, observer)
    scans = [node for node in exported.program.graph.nodes if str(node.target) == "scan"]
    assert len(scans) == 6
    assert len({node.args[0].target for node in scans}) <= 3
    assert exported.to_onnx(tmp_path / "model.onnx").verify().ok
