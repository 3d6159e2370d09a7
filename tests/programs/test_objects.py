"""Models that take and return objects of their own classes, with tensors among the attributes."""

import collections
import dataclasses
import weakref

import pytest
import torch
from tokenizers import AddedToken

import exportkit
from exportkit.errors import ArgumentError, ExportError, TreeError
from exportkit.trees.objects import changing_classes
from tests.models import Growing

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


class Listed:
    """A cache that grows by a tensor for each layer."""

    def __init__(self):
        self.keys, self.seen_tokens = [], 0

    def update(self, layer, keys):
        self.seen_tokens += keys.shape[1] if layer == 0 else 0
        if len(self.keys) <= layer:
            self.keys.append(keys)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], keys], 1)
        return self.keys[layer]


@dataclasses.dataclass
class Parameters:
    """A cache that grows by an entry for each layer."""

    offset: int = 0
    memory: dict = dataclasses.field(default_factory=dict)


class Attends(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.positions, self.query = torch.nn.Embedding(99, 4), torch.nn.Linear(4, 4)

    def attended(self, x, keys):
        mask = torch.ones(x.shape[1], keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - x.shape[1])
        return x + (self.query(x) @ keys.mT).masked_fill(~mask, -1e9).softmax(-1) @ keys

    def placed(self, x, start):
        return x + self.positions(torch.arange(start, start + x.shape[1]))


class WithOne(Attends):
    def forward(self, x, cache):
        x = self.placed(x, cache.offset)
        return self.attended(x, cache.update(x))


class WithMany(Attends):
    def forward(self, x, caches):
        for cache in caches:
            x = self.attended(x, cache.update(x))
        return x


class WithListed(Attends):
    def forward(self, x, cache):
        x = self.placed(x, cache.seen_tokens)
        for layer in range(2):
            x = self.attended(x, cache.update(layer, x))
        return x


class WithParameters(Attends):
    def forward(self, x, cache):
        x = self.placed(x, cache.offset)
        for layer in range(2):
            keys = torch.cat([cache.memory[layer], x], 1) if layer in cache.memory else x
            cache.memory[layer] = keys
            x = self.attended(x, keys)
        cache.offset += x.shape[1]
        return x


FILLED = {
    "an attribute": (WithOne, Growing),
    "a list of caches": (WithMany, lambda: [Growing(), Growing()]),
    "a list": (WithListed, Listed),
    "a dict": (WithParameters, Parameters),
}


@pytest.mark.parametrize("kind", FILLED)
def test_a_cache_that_the_model_fills_may_begin_without_tensors(kind, tmp_path):
    make_model, make_cache = FILLED[kind]
    model, observer = make_model(), exportkit.InputObserver()
    with observer(model, store_n_calls=5), torch.no_grad():
        for batch, lengths in ((2, (5, 1, 1)), (3, (4, 2))):
            cache = make_cache()
            for length in lengths:
                model(torch.randn(batch, length, 4), cache)
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "graph.onnx")
    assert graph.verify().ok
    mine, others = make_cache(), make_cache()
    for length in (3, 2, 1):
        x = torch.randn(4, length, 4)
        torch.testing.assert_close(graph(x, mine), model(x, others))
    for one, other in zip(
        *[caches if isinstance(caches, list) else [caches] for caches in (mine, others)], strict=True
    ):
        assert numbers_in(one) == numbers_in(other)


def numbers_in(cache):
    return [value for value in vars(cache).values() if type(value) is int]


def test_a_saved_observation_has_the_cache_as_it_was_before_the_first_call(tmp_path):
    model, observer, cache = WithOne(), exportkit.InputObserver(), Growing()
    with observer(model), torch.no_grad():
        for length in (5, 1):
            model(torch.randn(2, length, 4), cache)
    observer.observation.save(tmp_path / "calls", values=True)
    changing_classes.discard(Growing)  # as in a new process
    first, second = exportkit.Observation.load(tmp_path / "calls").calls
    assert first.arguments["cache"].constants() == {"keys": None, "offset": 0}
    assert second.arguments["cache"].constants() == {"offset": 5}


class Counted:
    def __init__(self, calls=0):
        self.calls = calls


class Counts(torch.nn.Module):
    def forward(self, x, statistics):
        statistics.calls += 1
        return x * statistics.calls


def test_an_object_without_tensors_may_be_changed_by_the_model(tmp_path):
    model, observer, counted = Counts(), exportkit.InputObserver(), Counted()
    with observer(model):
        for rows in (2, 3, 4):
            model(torch.randn(rows, 4), counted)
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "graph.onnx")
    assert graph.verify().ok
    counted, x = Counted(8), torch.randn(5, 4)
    assert torch.equal(graph(x, counted), x * 9)
    assert counted.calls == 9


class Sums(torch.nn.Module):
    def forward(self, x, values):
        return x + sum(values.values() if isinstance(values, dict) else values)


CONTAINERS = {
    "deque": lambda *tensors: collections.deque(tensors, maxlen=4),
    "OrderedDict": lambda *tensors: collections.OrderedDict(zip("ab", tensors, strict=True)),
    "defaultdict": lambda *tensors: collections.defaultdict(list, zip("ab", tensors, strict=True)),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_of_the_standard_library_are_inputs(kind, tmp_path):
    model, observer, contained = Sums(), exportkit.InputObserver(), CONTAINERS[kind]
    with observer(model):
        for rows in (2, 3):
            model(torch.randn(rows, 4), contained(torch.randn(rows, 4), torch.randn(4)))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "graph.onnx")
    assert graph.verify().ok
    args = torch.randn(5, 4), contained(torch.randn(5, 4), torch.randn(4))
    torch.testing.assert_close(graph(*args), model(*args))
