"""Models that take and return objects of their own classes, with tensors among the attributes."""

import dataclasses
import weakref

import pytest
import torch
from tokenizers import AddedToken

import exportkit
from exportkit.errors import ArgumentError, ExportError, TreeError

pytestmark = pytest.mark.runtime


class Graph:
    def __init__(self, x, edges):
        self.store = {"x": x, "edges": edges}
        self.itself = weakref.ref(self)

    def __getattr__(self, name):
        try:
            return self.__dict__["store"][name]
        except KeyError:
            raise AttributeError(name) from None


class Gaussian:
    def __init__(self, moments):
        self.moments = moments
        self.mean, self.logvar = moments.chunk(2, dim=-1)
        self.nodes, self.deterministic = moments.shape[0], False

    @property
    def std(self):
        return self.logvar.mul(0.5).exp()


class Encodes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 6)

    def forward(self, graph):
        x = self.linear(graph.itself().x)
        return Gaussian(x.index_add(0, graph.edges[1], x[graph.edges[0]]))


def graph(nodes, edges):
    return Graph(torch.randn(nodes, 4), torch.randint(0, nodes, (2, edges)))


def exported(model, *calls):
    observer = exportkit.InputObserver()
    with observer(model):
        for call in calls:
            model(call)
    return exportkit.export(model, observer)


def test_objects_are_taken_and_returned_also_from_a_folder(tmp_path, monkeypatch):
    model = Encodes().eval()
    program = exported(model, graph(4, 5), graph(6, 9))
    onnx_model = program.to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    program.save(tmp_path / "folder")
    for runner in (onnx_model, exportkit.load(tmp_path / "folder")):
        given = graph(9, 20)
        got, wanted = runner(given), model(given)
        assert type(got) is Gaussian
        assert (got.nodes, got.deterministic) == (9, False)
        torch.testing.assert_close(got.std, wanted.std)
        given.store["more"] = torch.ones(1)
        with pytest.raises(ArgumentError):
            runner(given)
        given = graph(9, 20)
        given.directed = True
        with pytest.raises(ArgumentError, match="directed=True"):
            runner(given)
    monkeypatch.delitem(globals(), "Gaussian")
    with pytest.raises(TreeError, match="No class was found with the name Gaussian"):
        exportkit.load(tmp_path / "folder")


class Features:
    """As a tokenizer returns them: with objects that are written in C, and that no model reads."""

    def __init__(self, ids):
        self.ids = ids
        self.encodings = [AddedToken(str(number)) for number in range(len(ids))]

    def __setitem__(self, name, value):
        setattr(self, name, value)


class Pools(torch.nn.Module):
    """Changes its argument and returns it."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(9, 4)

    def forward(self, features):
        features["tokens"] = self.embedding(features.ids)
        features["pooled"] = features.tokens.mean(1)
        return features


def test_an_object_that_is_changed_and_returned_is_the_one_that_was_given(tmp_path):
    model = Pools().eval()
    onnx_model = exported(model, *(Features(torch.randint(0, 9, shape)) for shape in ((2, 3), (3, 5)))).to_onnx(
        tmp_path / "model.onnx"
    )
    given = Features(torch.randint(0, 9, (4, 6)))
    wanted = model(Features(given.ids)).pooled
    ids = given.ids
    assert onnx_model(given) is given
    torch.testing.assert_close(given.pooled, wanted)
    assert given.ids is ids
    assert len(given.encodings) == 4


def test_a_model_that_reads_a_value_that_cannot_be_compared_is_refused():
    class Reads(torch.nn.Module):
        def forward(self, features):
            return features.ids * len(features.encodings)

    with pytest.raises(ExportError, match="cannot be compared between calls"):
        exported(Reads(), Features(torch.ones(2, 3)), Features(torch.ones(4, 5)))


class Batch:
    def __init__(self, x, texts, scale=1, **others):
        self.x, self.texts, self.scale = x, texts, scale
        self.__dict__.update(others)


class Reads(torch.nn.Module):
    def __init__(self, whole=False):
        super().__init__()
        self.whole = whole

    def forward(self, batch):
        factor = len(vars(batch)) if self.whole else 2
        return batch.x * batch.scale * (factor if getattr(batch, "doubled", False) else 1)


def test_attributes_that_the_model_does_not_read_may_differ(tmp_path):
    model = Reads()
    program = exported(model, Batch(torch.randn(2, 3), ["a"]), Batch(torch.randn(4, 5), ["b"]))
    program.save(tmp_path / "folder")
    runner = program.to_onnx(tmp_path / "model.onnx")
    x = torch.randn(3, 4)
    for each in (runner, exportkit.load(tmp_path / "folder")):
        for given in (Batch(x, [], more=None), Batch(x, {"c": 1})):
            torch.testing.assert_close(each(given), model(given))
        for other in (Batch(x, ["a"], scale=3), Batch(x, ["a"], doubled=True)):
            with pytest.raises(ArgumentError):
                each(other)


def test_an_object_that_is_read_as_a_whole_is_compared_as_a_whole(tmp_path):
    program = exported(Reads(whole=True), *(Batch(torch.randn(n, 3), ["a"]) for n in (2, 4)))
    runner = program.to_onnx(tmp_path / "model.onnx")
    with pytest.raises(ArgumentError):
        runner(Batch(torch.randn(3, 3), ["b"]))


@dataclasses.dataclass
class Keys:
    """A cache with a tensor for each of two layers."""

    keys: list[torch.Tensor]


class TwoLayers(torch.nn.Module):
    def forward(self, x, past=None):
        kept = []
        for layer in range(2):
            kept.append(x if past is None else torch.cat([past.keys[layer], x], 1))
            x = (x @ kept[layer].mT).softmax(-1) @ kept[layer]
        return x, Keys(kept)


def test_an_object_may_hold_a_list_of_tensors_that_the_first_call_lacks(tmp_path):
    model, observer = TwoLayers(), exportkit.InputObserver()
    with observer(model):
        for batch, tokens in ((2, 5), (3, 4)):
            _, past = model(torch.randn(batch, tokens, 4))
            model(torch.randn(batch, 1, 4), past)
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "graph.onnx")
    assert graph.verify().ok
    x, past = torch.randn(1, 2, 4), Keys([torch.randn(1, 7, 4), torch.randn(1, 7, 4)])
    for args in ((x,), (x, past)):
        (expected, kept), (got, other) = model(*args), graph(*args)
        torch.testing.assert_close([got, *other.keys], [expected, *kept.keys])
