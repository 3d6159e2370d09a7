"""The model confirms what the sizes suggest."""

import pytest
import torch

from exportkit import InputObserver
from exportkit.errors import PlanError


class Elementwise(torch.nn.Module):
    """Two inputs that have nothing to do with each other."""

    def forward(self, x, y):
        return x * 2, y + 1


class Added(torch.nn.Module):
    """Two inputs that must have one length."""

    def forward(self, x, y):
        return x + y


class Positions(torch.nn.Module):
    """Like m-rope: the first axis of the positions is not the batch."""

    def forward(self, ids, positions):
        return torch.nn.functional.one_hot(ids, 9).float() * positions.sum(0)[..., None]


class Vector(torch.nn.Module):
    """An input without a batch."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 4)

    def forward(self, x):
        return self.linear(x)


class Softmaxed(torch.nn.Module):
    """Rows depend on each other, so no axis is a batch."""

    def forward(self, x):
        return torch.softmax(x, dim=0)


class Counting(torch.nn.Module):
    """Keeps what a forward in training mode changes."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.norm(x)


def planned(model, *calls, probe=True):
    observer = InputObserver()
    with observer(model):
        for args in calls:
            model(*args)
    return observer.plan(probe=probe)


def sizes_of(plan):
    return {leaf.path: tuple(map(str, leaf.sizes)) for leaf in plan.leaves}


def test_axes_equal_by_coincidence_are_pulled_apart():
    calls = [(torch.randn(2, 6), torch.randn(4, 6)), (torch.randn(3, 7), torch.randn(5, 7))]
    assert len({sizes_of(planned(Elementwise(), *calls))[name][1] for name in "xy"}) == 2
    assert len({sizes_of(planned(Elementwise(), *calls, probe=False))[name][1] for name in "xy"}) == 1


def test_axes_that_the_model_needs_equal_stay_together():
    calls = [(torch.randn(2, 6), torch.randn(2, 6)), (torch.randn(3, 7), torch.randn(3, 7))]
    sizes = sizes_of(planned(Added(), *calls))
    assert sizes["x"] == sizes["y"]
    assert sizes["x"][0] == "batch"


class Idle(torch.nn.Module):
    """A mask that is not looked at as long as it hides nothing, as in transformers."""

    def forward(self, x, mask):
        return x if bool(mask.all()) else x * mask[..., None]


class Regrouped(torch.nn.Module):
    """Memory that is viewed in the batch of the tokens, as in the cross attention of Whisper."""

    def forward(self, x, memory):
        return x.sum(1, keepdim=True) + memory.view(x.shape[0], -1, memory.shape[-1]).mean(1, keepdim=True)


def test_a_mask_that_hides_nothing_does_not_come_apart():
    calls = [(torch.randn(n, length, 4), torch.ones(n, length).long()) for n, length in ((2, 9), (3, 12))]
    assert sizes_of(planned(Idle(), *calls)) == {"x": ("batch", "sequence", "4"), "mask": ("batch", "sequence")}


def test_a_batch_that_another_one_can_be_divided_by_does_not_come_apart():
    calls = [(torch.randn(n, length, 4), torch.randn(n, 300, 4)) for n, length in ((2, 9), (3, 12))]
    sizes = sizes_of(planned(Regrouped(), *calls))
    assert sizes["x"][0] == sizes["memory"][0] == "batch"


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_batch_that_never_varied_is_found_where_it_is(batch):
    positions = [(torch.randint(9, (batch, n)), torch.ones(4, batch, n)) for n in (5, 3)]
    assert sizes_of(planned(Positions(), *positions)) == {
        "ids": ("batch", "sequence"),
        "positions": ("4", "batch", "sequence"),
    }


class Codebooks(torch.nn.Module):
    """Takes as many rows of codes for each row of the other input, or any number of them."""

    def __init__(self, each):
        super().__init__()
        self.each = each

    def forward(self, x, codes):
        return x + codes.view(-1, 2, 4).sum(1) if self.each else (x, codes.sum(0))


@pytest.mark.parametrize(("each", "expected"), [(True, "2*batch"), (False, "codes_axis_0")])
def test_rows_that_are_a_multiple_of_the_batch_are_found_in_two_batches(each, expected):
    calls = [(torch.randn(batch, 4), torch.randn(2 * batch, 4)) for batch in (2, 3)]
    assert sizes_of(planned(Codebooks(each), *calls))["codes"][0] == expected


def test_one_call_is_enough_to_find_the_batch():
    assert sizes_of(planned(Vector(), (torch.randn(1, 6),))) == {"x": ("batch", "6")}


def test_an_axis_that_the_model_fixes_is_no_batch():
    plan = planned(Vector(), (torch.randn(6),))
    assert sizes_of(plan) == {"x": ("6",)}
    assert any("batch stays static" in finding.text for finding in plan.findings)


def test_rows_that_depend_on_each_other_are_no_batch():
    assert sizes_of(planned(Softmaxed(), (torch.randn(3, 6),))) == {"x": ("3", "6")}


def test_probing_leaves_buffers_and_random_state_as_they_were():
    model = Counting().train()
    observer = InputObserver()
    with observer(model):
        model(torch.randn(3, 4))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    observer.plan()
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    assert observer.num_obs() == 1


class Noted(torch.nn.Module):
    """Keeps something of each call on itself, in attributes and in the place of a buffer."""

    def __init__(self):
        super().__init__()
        self.last = torch.nn.Buffer(torch.zeros(1))
        self.calls = 0

    def forward(self, x):
        self.last, self.calls, self.shape = torch.nn.Buffer(x.sum()[None]), self.calls + 1, x.shape
        return x * 2


def test_probing_leaves_the_attributes_of_modules_as_they_were():
    model, observer = Noted().eval(), InputObserver()
    with observer(model):
        model(torch.randn(3, 4))
    before = dict(vars(model)), dict(model.named_buffers())
    observer.plan()
    assert before[0] == vars(model)
    assert model.calls == 1
    assert before[1]["last"] is model.last


def test_probing_while_observing_records_nothing():
    model, observer = Added(), InputObserver()
    with observer(model):
        model(torch.randn(2, 6), torch.randn(2, 6))
        observer.plan()
    assert observer.num_obs() == 1


class Masked(torch.nn.Module):
    """A mask that only some calls have."""

    def forward(self, x, mask=None):
        return x if mask is None else x * mask[..., None]


def test_an_input_seen_once_takes_the_sizes_that_the_others_had_then():
    model, observer = Masked(), InputObserver()
    with observer(model):
        model(torch.randn(1, 5, 8), torch.ones(1, 5))
        model(torch.randn(1, 7, 8))
    assert sizes_of(observer.plan()) == {"x": ("batch", "x_axis_1", "8"), "mask": ("batch", "x_axis_1")}


class Sums(torch.nn.Module):
    """Three lengths; the third is the sum of the others by accident."""

    def forward(self, a, b, c):
        return a.sum(1) + b.sum(1) + c.sum(1)


class Joined(torch.nn.Module):
    """Three lengths; the third must be the sum of the others."""

    def forward(self, a, b, c):
        return torch.cat([a, b], dim=1) * c


@pytest.mark.parametrize(("model", "size"), [(Sums(), "c_axis_1"), (Joined(), "a_axis_1 + b_axis_1")])
def test_a_sum_stays_where_the_model_needs_it(model, size):
    lengths = [(2, 5), (3, 9), (6, 4)]
    calls = [(torch.randn(4, a), torch.randn(4, b), torch.randn(4, a + b)) for a, b in lengths]
    assert sizes_of(planned(model, *calls))["c"][1] == size


class Shared(torch.nn.Module):
    """A table that all rows share; with two rows it would not fit the tokens."""

    def forward(self, ids, table):
        return torch.nn.functional.one_hot(ids, 6) * table


def test_an_input_that_all_rows_share_does_not_hide_the_batch():
    table = torch.rand(1, 6)
    plan = planned(Shared(), (torch.arange(5)[None], table), (torch.arange(4)[None], table))
    assert sizes_of(plan) == {"ids": ("batch", "sequence"), "table": ("1", "6")}


class Doubles(torch.nn.Module):
    """Takes any dtype, and a dict with any keys."""

    def forward(self, x, data=None):
        return x * 2 if data is None else x * 2 + sum(data.values())


def test_a_dtype_that_changes_between_calls_is_said():
    model, observer = Doubles(), InputObserver()
    with observer(model):
        model(torch.ones(2))
        model(torch.ones(3, dtype=torch.float16))

    texts = [finding.text for finding in observer.plan().findings]
    assert "x is float32 in call 0, float16 in call 1; the graph takes float32 only." in texts


def test_keys_that_only_other_calls_have_are_said():
    model, observer = Doubles(), InputObserver()
    with observer(model):
        model(torch.ones(2), {"a": torch.ones(2)})
        model(torch.ones(3), {"b": torch.ones(3)})

    assert [finding.where for finding in observer.plan().findings if finding.kind == "other inputs"] == [
        "data.b (call 1)"
    ]


@pytest.mark.parametrize(
    ("adjacency", "got"),
    [
        (torch.eye(3).to_sparse(), "a sparse_coo tensor"),
        (torch.eye(3).to_sparse_csr(), "a sparse_csr tensor"),
        (torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged), "a nested tensor"),
    ],
)
def test_an_input_that_is_not_dense_is_refused(adjacency, got):
    class Convolution(torch.nn.Module):
        def forward(self, x, adjacency):
            return x * 2 if adjacency.is_nested else torch.mm(adjacency, x)

    model, observer = Convolution(), InputObserver()
    with observer(model):
        model(torch.rand(3, 5), adjacency)
    with pytest.raises(PlanError, match=f"where: adjacency\n  expected: a dense tensor\n  got: {got}\n  hint: pass "):
        observer.plan()
