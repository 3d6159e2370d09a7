"""The table of strategies: their order, and what a report says about the attempts."""

import functools
import itertools

import pytest
import torch

import exportkit
from exportkit.errors import ArgumentError, ExportError, RuntimeFailure
from exportkit.programs.strategies import STRATEGIES
from tests.programs import failing


def observed(model, *shapes):
    observer = exportkit.InputObserver()
    with observer(model.eval(), store_n_calls=len(shapes)):
        for shape in shapes:
            model(torch.randn(*shape))
    return observer


def test_the_table_is_in_the_order_in_which_strategies_are_tried():
    assert [strategy.name for strategy in STRATEGIES] == [
        "plain trace",
        "lists as separate tensors",
        "decisions by values",
        "selections of several values",
        "sizes between the multiples",
        "lengths kept symbolic between the multiples",
        "larger sizes",
        "lengths kept symbolic",
        "loops as one operator",
        "all recorded paths",
        "all recorded paths, with loops",
        "strict tracing",
        "arrays of numpy as tensors",
        "transformers' export patches",
        "static lengths",
        "several programs",
    ]


def test_a_plain_trace_is_the_only_attempt_where_it_succeeds():
    model = torch.nn.Linear(6, 2)
    exported = exportkit.export(model, observed(model, (2, 6), (3, 6)))
    assert [str(attempt) for attempt in exported.attempts] == ["plain trace: succeeded"]


def test_a_loop_over_a_length_that_no_call_varied_is_exported_with_static_lengths():
    model = failing.Loop()
    plan = observed(model, (2, 5, 6), (3, 5, 6)).plan().dynamic("x", 1)
    exported = exportkit.export(model, plan)
    assert exported.attempts[0].strategy == "plain trace"
    assert exported.attempts[0].outcome == "failed"
    assert exported.attempts[0].reason
    assert str(exported.attempts[-1]) == "plain trace, static lengths: succeeded"


class Selected(torch.nn.Module):
    """Returns the mean of the positive numbers of each row, and keeps them in a dict in between."""

    def forward(self, x):
        rows = {number: row[row > 0] for number, row in enumerate(x)}
        return torch.stack([rows[number].mean() for number in rows])


def test_a_batch_that_a_loop_fixes_may_be_accepted_as_static():
    observer = observed(Selected(), (1, 5), (1, 8))
    with pytest.raises(ExportError, match="the loop is unrolled") as caught:
        exportkit.export(Selected(), observer)
    assert 'Or accept it: export(model, observer.plan().static("batch"))' in str(caught.value)
    exported = exportkit.export(Selected(), observer.plan().static("batch"))
    x = torch.rand(1, 12)
    torch.testing.assert_close(exported.program.module(check_guards=False)(x=x), Selected()(x))


def test_where_nothing_helps_the_error_is_about_the_plain_trace():
    model = failing.Loop()
    with pytest.raises(ExportError, match="became static"):
        exportkit.export(model, observed(model, (2, 5, 6), (3, 7, 6)))


class Table(torch.nn.Module):
    """Keeps the table of the last length, as an attribute or as a buffer, or the longest one so far."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.register_buffer("table", None, persistent=False)
        if kind != "buffer":
            del self.table
            self.table = None

    def forward(self, x):
        length, old = x.shape[1], 0 if self.table is None else self.table.shape[0]
        if old < length if self.kind == "longest" else old != length:
            self.table = torch.arange(length, dtype=torch.float32)[:, None].sin()
        return x + self.table[:length]


@pytest.mark.parametrize("kind", ["attribute", "buffer", "longest"])
def test_what_earlier_calls_cached_for_their_sizes_limits_no_size(kind, tmp_path):
    model = Table(kind)
    exported = exportkit.export(model, observed(model, (2, 5, 4), (3, 8, 4)))
    assert exported.attempts[-1].strategy == "larger sizes"
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    for length in (3, 8, 11):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(onnx_model(x), model(x))


@functools.lru_cache
def table_of(length):
    return torch.arange(length, dtype=torch.float32)[:, None].sin()


class Grid(torch.nn.Module):
    """Keeps what it computes for a size, and makes an int of another size."""

    grid, size = None, None

    def forward(self, x):
        if self.grid is None or self.size != x.shape[1:]:
            self.grid, self.size = torch.linspace(0, 1, x.shape[1]), x.shape[1:]
        return x * self.grid / int(x.shape[0])


def test_sizes_that_are_cached_and_sizes_that_become_ints_limit_no_size(tmp_path):
    model = Grid()
    exported = exportkit.export(model, observed(model, (2, 6), (3, 9)))
    graph = exported.to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    for shape in ((4, 9), (1, 5), (2, 12)):
        x = torch.randn(*shape)
        torch.testing.assert_close(graph(x), model(x))


def test_a_function_that_caches_by_length_is_called_in_the_trace():
    class OfTable(torch.nn.Module):
        def forward(self, x):
            return x + table_of(x.shape[1])

    exported = exportkit.export(OfTable(), observed(OfTable(), (2, 5, 4), (3, 8, 4)))
    x = torch.randn(2, 11, 4)
    torch.testing.assert_close(exported.program.module()(x=x), OfTable()(x))
    assert table_of.cache_info().currsize > 0


class Pooled(torch.nn.Module):
    """Has a size of 1 in the recorded calls, for which it takes a branch of its own."""

    def forward(self, x):
        pooled = torch.nn.functional.avg_pool1d(x, 4)
        return pooled[..., 0] if pooled.shape[-1] == 1 else pooled.mean(-1)


def test_a_size_that_is_1_in_the_recorded_calls_limits_no_size(tmp_path):
    model = Pooled()
    exported = exportkit.export(model, observed(model, (2, 3, 5), (3, 3, 7)))
    assert [str(attempt) for attempt in exported.attempts] == ["plain trace: succeeded", "larger sizes: succeeded"]
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    for length in (5, 7, 13):
        x = torch.randn(2, 3, length)
        torch.testing.assert_close(onnx_model(x), model(x))


class Flags(torch.nn.Module):
    """Decides by the values of its buffers; may change them."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts
        self.register_buffer("is_ready", torch.tensor([True]))
        self.register_buffer("times", torch.linspace(0, 1, 5))
        self.register_buffer("shift", torch.tensor(3))

    def forward(self, x):
        assert (self.times.diff() > 0).all() or not self.is_ready
        if self.counts:
            self.shift += 1
        return x[:, int(self.shift) :] * 2 if self.is_ready else x


def test_a_buffer_is_read_as_a_number():
    model = Flags(counts=False).eval()
    exported = exportkit.export(model, observed(model, (2, 6), (3, 8)))
    assert exported.attempts[-1].strategy == "decisions by values"
    x = torch.randn(4, 9)
    torch.testing.assert_close(exported.program.module(check_guards=False)(x=x), model(x))


def assert_right_at_other_sizes(model):
    exported = exportkit.export(model, observed(model, (2, 6), (3, 6)))
    x = torch.randn(4, 6)
    torch.testing.assert_close(exported.program.module(check_guards=False)(x=x), model(x))


class Schedule:
    """Holds tensors that are not registered as buffers."""

    def __init__(self):
        self.steps, self.factors = torch.tensor([3, 1]), torch.linspace(0.1, 1, 5)


class Scheduled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.schedule = Schedule()

    def forward(self, x):
        for step in self.schedule.steps:
            x = x * self.schedule.factors[step] if step - 2 >= 0 else x + step
        return x


def test_a_tensor_in_an_object_is_read_as_a_number():
    assert_right_at_other_sizes(Scheduled())


class Solver(torch.nn.Module):
    """Integrates in steps from a start to an end, as solvers of differential equations do."""

    def forward(self, x):
        start, end = torch.tensor([0.0, 1.0])
        steps = torch.ceil((end - start) / 0.3 + 1).item()
        times = torch.arange(0, steps) * 0.3 + start
        times[-1] = end
        axes = torch.arange(1, x.ndim).tolist()
        assert (times.diff() > 0).all()
        for before, after in itertools.pairwise(times.unbind()):
            x = x - (after - before) * x.mean(axes, keepdim=True)
            if after >= end:
                return x
        return -x


def test_tensors_made_of_numbers_are_read_as_numbers():
    assert_right_at_other_sizes(Solver())


class PadsToAMultiple(torch.nn.Module):
    """Pads its input to a multiple of a buffer."""

    def __init__(self):
        super().__init__()
        self.stride = torch.nn.Buffer(torch.tensor(4), persistent=False)

    def forward(self, x):
        frames = torch.ceil(x.shape[-1] / self.stride).to(torch.int64)
        missing = frames * self.stride - x.shape[-1]
        if missing > 3:
            raise ValueError("too short")
        padded = torch.nn.functional.pad(x, (0, missing), value=2.0)
        return padded.unflatten(-1, (frames, 4)).sum(-1), padded[..., : self.stride + missing]


@pytest.mark.runtime
def test_a_length_that_follows_from_sizes_and_buffers_is_symbolic(tmp_path):
    model = PadsToAMultiple()
    exported = exportkit.export(model, observed(model, (2, 10), (3, 15)))
    assert [str(attempt) for attempt in exported.attempts][1:] == ["decisions by values: succeeded"]
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    for shape in ((4, 9), (2, 12), (5, 31)):
        x = torch.randn(*shape)
        for expected, got in zip(model(x), onnx_model(x), strict=True):
            torch.testing.assert_close(got, expected)


class Rounds(torch.nn.Module):
    """Computes a length in a way that rounds, and decides by it."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.stride, self.factor = torch.nn.Buffer(torch.tensor(3)), torch.nn.Buffer(torch.tensor(0.29))

    def forward(self, x):
        size = x.shape[-1]
        length = {
            "product": lambda: size * self.factor,
            "half": lambda: torch.tensor(size).to(torch.bfloat16),
            "multiple of a quotient": lambda: size / self.stride * 3,
            "weighted sum": lambda: torch.add(self.stride, torch.tensor(size), alpha=2),
            "product of Python": lambda: torch.tensor(size * 0.29),
            "sum with a product of Python": lambda: self.stride + size * 0.29,
        }[self.kind]()
        length = length.floor().long().item()
        if length > 10**6:
            raise ValueError("too long")
        return x.new_ones(x.shape[0], length)


ROUNDED = ["product", "half", "multiple of a quotient", "weighted sum", "product of Python"]


@pytest.mark.runtime
@pytest.mark.parametrize("kind", [*ROUNDED, "sum with a product of Python"])
def test_a_length_that_rounding_decides_about_is_not_taken_for_an_exact_number(kind, tmp_path):
    model = Rounds(kind).eval()
    onnx_model = exportkit.export(model, observed(model, (2, 20), (3, 31))).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    for size in (*range(1, 120), 257, 1001, 4097, 32769, 100000, 300001):
        x = torch.zeros(2, size)
        assert onnx_model(x).shape == model(x).shape
    with pytest.raises((ArgumentError, RuntimeFailure)):
        onnx_model(torch.zeros(1, 10**7))


READS = {
    "elements": lambda shapes: (shapes[1, 0], shapes[1][1]),
    "list": lambda shapes: shapes.tolist()[1],
    "rows": lambda shapes: [number.item() for number in list(shapes)[1]],
    "columns": lambda shapes: (shapes[:, 0].unbind()[1], shapes[-1, 1:][0]),
    "products": lambda shapes: [
        (shapes * 2 - shapes).prod(1)[1] // shapes[1, 1],
        shapes.cumsum(0)[1, 1] - shapes[0, 1],
    ],
}


@pytest.mark.runtime
@pytest.mark.parametrize("kind", READS)
def test_sizes_that_are_written_to_a_tensor_are_read_as_the_same_sizes(kind, tmp_path):
    class Levels(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.places = torch.nn.Buffer(torch.arange(64))

        def forward(self, x):
            x = x + self.places[: x.shape[-1]]
            half = torch.nn.functional.avg_pool2d(x, 2)
            height, width = READS[kind](torch.tensor([level.shape[-2:] for level in (x, half)]))
            rows, columns = torch.arange(0, height), torch.arange(0, width)
            mask = (rows[:, None] >= columns).flatten()[None, None]
            tokens = half.flatten(2).mT[:, None]  # attention asks whether there are as many as places in the mask
            tokens = torch.nn.functional.scaled_dot_product_attention(tokens, tokens, tokens, mask)
            return tokens.mT.reshape(x.shape[0], -1, int(height), int(width))

    model = Levels().eval()
    onnx_model = exportkit.export(model, observed(model, (2, 3, 8, 6), (1, 3, 4, 10))).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    for shape in ((3, 3, 10, 6), (1, 3, 6, 24), (2, 3, 4, 4)):
        x = torch.randn(*shape)
        torch.testing.assert_close(onnx_model(x), model(x))


def test_a_buffer_that_changes_is_not_read_as_a_number():
    model = Flags(counts=True).eval()
    with pytest.raises(ExportError):
        exportkit.export(model, observed(model, (2, 9), (3, 8)))


def test_distributions_do_not_check_the_values_of_a_trace():
    class Density(torch.nn.Module):
        def forward(self, x):
            return torch.distributions.Normal(x, x.exp()).log_prob(x + 1)

    torch.distributions.Distribution.set_default_validate_args(True)  # once Dynamo is used, it turns the checks off
    exported = exportkit.export(Density(), observed(Density(), (2, 6), (3, 6)))
    assert [str(attempt) for attempt in exported.attempts] == ["plain trace: succeeded"]
    with pytest.raises(ValueError, match="scale"):  # as before
        torch.distributions.Normal(0.0, -1.0)


class Asking(torch.nn.Module):
    """Tries a layer with an argument that it may not take."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 6), torch.nn.ReLU()])

    def forward(self, x):
        for layer in self.layers:
            try:
                x = layer(x, lengths=None)
            except TypeError:
                x = layer(x)
        return x


def test_a_model_may_catch_the_errors_of_its_modules():
    assert_right_at_other_sizes(Asking())
