"""Weights in fewer bits: what is quantised, what is left, and what is refused."""

import logging
from dataclasses import replace

import onnx
import pytest
import torch

import exportkit
from exportkit.errors import InvalidRequestError
from exportkit.onnx_files.quantised import heads_of, read_layers, read_quantisable
from exportkit.onnx_files.quantisers import quantise
from exportkit.running.compare import distance
from exportkit.running.session import Session


class Words(torch.nn.Module):
    """Tokens, one layer, and logits over the tokens; a mask decides which tokens have a part in the mean."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 64)
        self.layer = torch.nn.Linear(64, 64)
        self.head = torch.nn.Linear(64, 50, bias=False)

    def forward(self, tokens, mask):
        x = self.table(tokens)
        x = x + self.layer(x).relu()
        shown = mask[..., None].to(x.dtype)
        return {"logits": self.head(x), "mean": (x * shown).sum(1) / shown.sum(1)}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Words().eval()


@pytest.fixture(scope="module")
def exported(model):
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, tokens, shown in ((2, 6, 4), (3, 8, 8)):
            mask = (torch.arange(tokens) < shown).long().expand(batch, -1).clone()
            model(torch.randint(0, 50, (batch, tokens)), mask)
    return exportkit.export(model, observer)


def stored(onnx_model):
    return {layer.name: layer.stored for layer in onnx_model.file.quantised.layers}


def operators(onnx_model):
    return [node.op_type for node in onnx.load(onnx_model.path, load_external_data=False).graph.node]


def test_a_quantised_graph_is_smaller_and_measured(exported, tmp_path):
    handlers = list(logging.getLogger().handlers)
    whole = exported.to_onnx(tmp_path / "whole.onnx")
    int8 = exported.to_onnx(tmp_path / "int8.onnx", weights="int8")
    int4 = exported.to_onnx(tmp_path / "int4.onnx", weights="int4", runtime="onnxruntime")
    assert logging.getLogger().handlers == handlers
    sizes = [(tmp_path / f"{name}.onnx.data").stat().st_size for name in ("int4", "int8", "whole")]
    assert sizes == sorted(sizes)
    assert stored(int4) == {"table": "float32", "layer": "int4", "head": "int4"}
    assert operators(int4).count("MatMulNBits") == 2
    node = next(n for n in onnx.load(int4.path, load_external_data=False).graph.node if n.op_type == "MatMulNBits")
    assert "layer" in {entry.key: entry.value for entry in node.metadata_props}["pkg.torch.onnx.name_scopes"]
    reports = [onnx_model.verify() for onnx_model in (int4, int8)]
    for report in reports:
        text = str(report)
        assert report.ok
        assert report.is_measured
        assert text.startswith("measured: top-1 agreement ")
        assert "proven" not in text
        assert {row.status for row in report.rows} == {"measured"}
    errors = [report.figures["recorded"]["logits"].error for report in reports]
    assert 0.01 < errors[0] < 0.3
    assert errors[1] < errors[0] / 5
    assert whole.verify().verdict() == "proven"


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "int8"},
        {"weights": exportkit.Quantisation("int8", activations="dynamic")},
        {"weights": exportkit.Quantisation("int8", activations="static")},
        {"dtype": "float16"},
    ],
    ids=["weights", "dynamic", "static", "dtype"],
)
def test_a_file_of_the_working_directory_is_replaced(exported, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert exported.to_onnx("model.onnx", **options).verify().ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]


class Shifted(Words):
    """Logits that two inputs change, each of which may be left out."""

    def forward(self, tokens, mask, shift=None, scale=None):
        logits = super().forward(tokens, mask)["logits"]
        logits = logits if shift is None else logits + shift
        return logits if scale is None else logits * scale


def test_quantised_weights_do_not_change_which_inputs_may_be_left_out(tmp_path):
    torch.manual_seed(0)
    model, observer = Shifted().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, tokens, name in ((2, 6, "shift"), (3, 8, "scale"), (2, 7, "shift")):
            mask = torch.ones(batch, tokens, dtype=torch.long)
            model(torch.randint(0, 50, (batch, tokens)), mask, **{name: torch.rand(batch, tokens, 1)})
    int8 = exportkit.export(model, observer).to_onnx(tmp_path / "int8.onnx", weights="int8")
    without_both = [row for row in int8.verify().rows if "without shift, scale" in row.label]
    assert [row.status for row in without_both] == ["measured"]
    assert frozenset(["shift", "scale"]) in int8.domain.absent


def test_positions_that_padding_hides_are_not_counted(exported, tmp_path):
    report = exported.to_onnx(tmp_path / "model.onnx", weights="int4").verify()
    first, second = (row.figures["logits"] for row in report.rows if row.kind == "recorded")
    assert (first.positions, second.positions) == (2 * 4, 3 * 8)
    assert report.rows[0].figures["mean"].top1 is None


def test_a_saved_folder_is_measured_again_without_the_model(exported, tmp_path):
    saved = exported.save(tmp_path / "out", weights="int4")
    loaded = exportkit.load(tmp_path / "out")
    assert loaded.file.quantised == saved.file.quantised
    report = loaded.verify()
    assert report.verdict() == (tmp_path / "out" / "report.txt").read_text().splitlines()[0]
    assert report.verdict().startswith("measured: ")
    page = exported.report(tmp_path / "page.html")
    assert "measured" not in page.read_text()


def test_the_page_says_measured(exported, tmp_path):
    from exportkit.report.export import export_page

    exported.save(tmp_path / "out", weights="int4")
    page = export_page(tmp_path / "out")
    assert "nothing is proven: measured: top-1 agreement" in page
    assert ">proven<" not in page
    assert "<code>int4</code>" in page


def test_the_embedding_and_the_head_are_options(exported, tmp_path):
    wanted = exportkit.Quantisation("int4", block_size=16, symmetric=True, embedding=True, head=False)
    onnx_model = exported.to_onnx(tmp_path / "model.onnx", weights=wanted)
    assert stored(onnx_model) == {"table": "int4", "layer": "int4", "head": "float32"}
    assert "GatherBlockQuantized" in operators(onnx_model)
    report = onnx_model.verify()
    assert report.ok
    assert "left as they were: head (head)" in str(report)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weights": "int3"}, "int3"),
        ({"block_size": 48}, "power of two"),
        ({"weights": "int8", "embedding": True}, "embeddings to int4 only"),
        ({"activations": "static"}, "weights='int8'"),
        ({"weights": "int8", "activations": "both"}, "'dynamic' or 'static'"),
    ],
)
def test_quantisations_that_do_not_exist_are_refused(options, text):
    with pytest.raises(InvalidRequestError, match=text):
        exportkit.Quantisation(**options)


def test_a_model_without_matrices_is_refused_with_what_it_has(tmp_path):
    model, observer = torch.nn.Conv2d(16, 16, 3), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for size in (8, 9):
            model(torch.randn(2, 16, size, size))
    with pytest.raises(InvalidRequestError, match=r"no weights that can be quantised.\n.*\n.*\n  got: 1 Conv"):
        exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx", weights="int4")
    assert not list(tmp_path.iterdir())


def test_a_budget_without_quantised_weights_is_refused(exported, tmp_path):
    with pytest.raises(InvalidRequestError, match="all others are proven"):
        exported.to_onnx(tmp_path / "model.onnx", accuracy=0.9)


GRAPH = """<ir_version: 11, opset_import: ["" : 18]>
g (float[N, 4] x) => (float[N, 3] y, float[N, 3] z, float[N, 3] sum)
<float[3, 4] w, float[3] b, float[1] two>
{
    turned = Transpose <perm = [1, 0]> (w)
    hidden = MatMul (x, turned)
    y = Gemm <transB = 1> (x, w, b)
    z = Div (hidden, two)
    sum = Add (y, hidden)
}"""


def test_matrices_behind_a_transpose_or_in_a_gemm_become_plain_products(tmp_path):
    torch.manual_seed(0)
    model = onnx.parser.parse_model(GRAPH)
    for name, tensor in {"w": torch.randn(3, 4), "b": torch.randn(3), "two": torch.tensor([2.0])}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(tensor.numpy(), name))
    onnx.save(model, tmp_path / "model.onnx")
    simple = read_quantisable(tmp_path / "model.onnx")
    assert [node.op_type for node in simple.graph.node] == ["MatMul", "MatMul", "Add", "Div", "Add"]
    assert {tensor.name for tensor in simple.graph.initializer} == {"turned", "b", "two"}
    makers = {name: node.output[0] for node in simple.graph.node for name in [node.name]}
    assert {output: makers[node] for output, node in heads_of(simple, ["y", "z", "sum"]).items()} == {
        "y": "y_product",
        "z": "hidden",
    }
    feeds = {"x": torch.randn(5, 4)}
    before, after = Session(tmp_path / "model.onnx").run(feeds), Session(simple.SerializeToString()).run(feeds)
    for name in before:
        torch.testing.assert_close(before[name], after[name])


def test_a_matrix_may_be_stored_in_two_ways(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(64, 64)
            self.layer = torch.nn.Linear(64, 64, bias=False)

        def forward(self, tokens):
            x = self.table(tokens)
            return self.layer(self.layer(x).relu()) @ self.table.weight

    torch.manual_seed(0)
    model, observer = Tied().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for size in (30, 50):
            model(torch.randint(0, 64, (size,)))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    graph = read_quantisable(onnx_model.path)
    layers = read_layers(graph, [], exportkit.Quantisation(embedding=True))
    assert [layer.operator for layer in layers] == ["Gather", "MatMul", "MatMul", "MatMul"]
    kinds = ("int4", "int8", "int4", "int8")
    layers = [replace(layer, stored=kind) for layer, kind in zip(layers, kinds, strict=True)]
    feeds = onnx_model.feeds(torch.arange(64))
    before = Session(graph.SerializeToString()).run(feeds)
    quantise(graph, layers, exportkit.Quantisation(embedding=True))
    names = [tensor.name for tensor in graph.graph.initializer]
    assert len(names) == len(set(names))
    (expected,), (got,) = before.values(), Session(graph.SerializeToString()).run(feeds).values()
    assert 0 < distance(expected, got).rms < 0.2


class Projections(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(64, width, bias=width > 32) for width in (96, 32, 48))
        self.shared = torch.nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return self.query(x), self.key(x) * 2, self.value(x).relu(), x @ self.shared, (x + 1) @ self.shared


@pytest.mark.parametrize("options", [{}, {"symmetric": True, "block_size": 16}, {"weights": "int8"}], ids=str)
def test_products_of_the_same_values_become_one_without_changing_results(options, tmp_path):
    torch.manual_seed(0)
    model, observer = Projections().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for size in (3, 5):
            model(torch.randn(size, 64))
    exported, wanted = exportkit.export(model, observer), exportkit.Quantisation(**{"weights": "int4", **options})
    whole = exported.to_onnx(tmp_path / "whole.onnx", runtime="onnxruntime")
    graph = read_quantisable(whole.path)
    quantise(graph, read_layers(graph, [], wanted), wanted)
    apart = {node.name for node in graph.graph.node if node.op_type == "MatMulNBits"}
    packed = exported.to_onnx(tmp_path / "packed.onnx", weights=wanted, runtime="onnxruntime")
    products = [node for node in onnx.load(packed.path).graph.node if node.op_type == "MatMulNBits"]
    assert (len(apart), len(products)) == (5, 3)
    assert [layer.name for layer in packed.file.quantised.layers][:3] == ["query", "key", "value"]
    x = torch.randn(7, 64)
    expected = Session(graph.SerializeToString(), optimised=False).run(whole.feeds(x))  # optimised, it fuses biases
    got = Session(packed.path, optimised=False).run(packed.feeds(x))
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
    assert packed.verify().is_measured


class Picture(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.layer, self.head = torch.nn.Conv2d(8, 16, 3), torch.nn.Linear(16, 64), torch.nn.Linear(64, 20)

    def forward(self, x):
        return {"logits": self.head(self.layer(self.conv(x).relu().mean((2, 3))).relu())}


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_activations_are_quantised_together_with_weights(activations, tmp_path):
    torch.manual_seed(0)
    model, observer = Picture().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for size in (8, 10):
            model(torch.randn(4, 8, size, size))
    exported = exportkit.export(model, observer)
    handlers = list(logging.getLogger().handlers)
    wanted = exportkit.Quantisation("int8", activations=activations)
    onnx_model = exported.to_onnx(tmp_path / "model.onnx", weights=wanted)
    assert logging.getLogger().handlers == handlers
    assert stored(onnx_model) == {"conv": "int8", "layer": "int8", "head": "int8"}
    used = operators(onnx_model)
    assert ("ConvInteger" in used and "MatMulInteger" in used) if activations == "dynamic" else "QuantizeLinear" in used
    report = onnx_model.verify()
    error = report.figures["recorded"]["logits"].error
    assert report.ok
    assert 1e-4 < error < 0.1
    assert f"3 in int8, with {activations} activations." in str(report)
    kept = exported.to_onnx(tmp_path / "kept.onnx", weights=wanted, accuracy={"error": error / 2})
    assert kept.verify().ok
    assert "float32" in stored(kept).values()
