"""Attention as one operator in graphs for onnxruntime: what it computes is what torch computes."""

import pytest
import torch

from exportkit.onnx_files.attention import with_whole_attention
from exportkit.onnx_files.translate import onnx_program
from exportkit.running.session import Session

functional = torch.nn.functional
LOWEST = torch.finfo(torch.float32).min


class Cached(torch.nn.Module):
    """Attention with two heads of keys for four of queries, over a cache."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, heads, past_key, past_value, mask):
        query, key, value = heads.split([4, 2, 2], 1)
        keys, values = torch.cat([past_key, key], -2), torch.cat([past_value, value], -2)
        repeated = [part[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for part in (keys, values)]
        return functional.scaled_dot_product_attention(query, *repeated, mask, **self.options), keys, values


def cached_call(batch, tokens, past, mask=None):
    total = past + tokens
    if mask is None:
        mask = torch.ones(batch, 1, tokens, total, dtype=torch.bool).tril(past)
    return torch.randn(batch, 8, tokens, 8), torch.randn(batch, 2, past, 8), torch.randn(batch, 2, past, 8), mask


AXES = ({0: "b", 2: "s"},) + ({0: "b", 2: "p"},) * 2 + ({0: "b", 2: "s", 3: "p+s"},)


def dynamic(axes):
    return tuple(dict.fromkeys(names, torch.export.Dim.DYNAMIC) for names in axes)


def fused(model, args, axes, zeros=()):
    """The nodes of the fused graph by operator, and a function that runs it."""
    program = torch.export.export(model.eval(), args, dynamic_shapes=dynamic(axes))
    translated = onnx_program(program, 23, zeros=zeros)
    nodes = {}
    for node in translated.model.graph:
        nodes.setdefault(node.op_type, []).append(node)
    session = Session(translated.model_proto.SerializeToString())

    def run(*given):
        names = [value.name for value in translated.model.graph.inputs]
        return list(session.run(dict(zip(names, given, strict=True))).values())

    return nodes, run


def assert_same(model, run, args):
    expected = model(*args)
    for one, other in zip(expected if isinstance(expected, tuple) else (expected,), run(*args), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_heads_are_not_repeated_and_the_cache_goes_in_by_itself():
    model = Cached()
    nodes, run = fused(model, cached_call(2, 3, 5), AXES)
    (attention,) = nodes["Attention"]
    assert [value.name for value in attention.inputs[4:6]] == ["past_key", "past_value"]
    assert not {"Softmax", "MatMul"} & nodes.keys()
    for batch, tokens, past in ((2, 3, 5), (1, 1, 7), (3, 1, 1), (3, 4, 0), (1, 6, 2)):
        assert_same(model, run, cached_call(batch, tokens, past))


def test_rows_without_a_visible_key_are_zeros():
    model = Cached()
    _, run = fused(model, cached_call(2, 3, 5), AXES)
    call = cached_call(3, 4, 2)
    call[-1][0, :, 1], call[-1][2] = False, False
    assert_same(model, run, call)


class Layer(torch.nn.Module):
    """Attention over a cache with its projections, and heads that are moved before tokens as transformers does it."""

    def __init__(self, width=8, value_width=None, turns=False, norm=False):
        super().__init__()
        self.width, self.turns, value_width = width, turns, value_width or width
        self.query, self.key = torch.nn.Linear(12, 4 * width), torch.nn.Linear(12, 2 * width)
        self.value, self.out = torch.nn.Linear(12, 2 * value_width), torch.nn.Linear(4 * value_width, 12)
        self.norm = torch.nn.RMSNorm(width) if norm else torch.nn.Identity()

    def forward(self, x, past_key, past_value, mask):
        query, key = (self.norm(layer(x).unflatten(-1, (-1, self.width))) for layer in (self.query, self.key))
        query, key = self.turned(query.transpose(1, 2)), self.turned(key.transpose(1, 2))
        value = self.value(x).unflatten(-1, (2, -1)).transpose(1, 2)
        keys, values = torch.cat([past_key, key], -2), torch.cat([past_value, value], -2)
        repeated = [part[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for part in (keys, values)]
        found = functional.scaled_dot_product_attention(query, *repeated, mask, scale=0.4)
        return self.out(found.transpose(1, 2).flatten(2)), keys, values

    def turned(self, heads):
        if not self.turns:
            return heads
        half = self.width // 2
        angles = torch.arange(heads.shape[2])[None, :, None] * torch.linspace(1, 0.1, half)
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return heads * cos + torch.cat([-heads[..., half:], heads[..., :half]], -1) * sin

    def call(self, batch, tokens, past, mask=None):
        mask = cached_call(batch, tokens, past)[-1] if mask is None else mask
        sizes = self.width, self.value.out_features // 2
        return torch.randn(batch, tokens, 12), *(torch.randn(batch, 2, past, size) for size in sizes), mask


LAYER_AXES = ({0: "b", 1: "s"}, *AXES[1:])


@pytest.mark.parametrize(
    ("options", "moves"), [({}, 0), ({"turns": True}, 0), ({"norm": True}, 4), ({"norm": True, "turns": True}, 4)]
)
def test_heads_are_not_moved_before_tokens(options, moves):
    model = Layer(**options)
    nodes, run = fused(model, model.call(2, 3, 5), LAYER_AXES)
    assert "Transpose" not in nodes
    assert len(nodes.get("Reshape", ())) == moves
    for sizes in ((2, 3, 5), (1, 1, 7), (3, 4, 0), (1, 1, 0)):
        assert_same(model, run, model.call(*sizes))


def test_a_prompt_with_nothing_before_it_is_not_computed_beyond_the_diagonal():
    model = Layer(turns=True)
    nodes, run = fused(model, model.call(2, 3, 5), LAYER_AXES)
    (choice,) = nodes["If"]
    kinds = [node.op_type for branch in ("then_branch", "else_branch") for node in choice.attributes[branch].as_graph()]
    assert kinds == ["GroupQueryAttention", "Attention"]
    plain = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    masks = [plain, plain | True, plain & False, plain.tril(-1), plain.triu(-2) & plain]
    for place in ((1, 0, 5, 5), (0, 0, 0, 1), (1, 0, 3, 0)):  # one entry that differs
        masks.append(plain.clone())
        masks[-1][place] ^= True
    masks += [plain.clone(), plain.clone()]
    masks[-1][0, :, :, :3], masks[-2][1, :, :, 4:] = False, False  # padding before and after the tokens
    for mask in masks:
        assert_same(model, run, model.call(2, 6, 0, mask))
    for sizes in ((1, 40, 0), (3, 1, 0), (1, 1, 9), (3, 4, 2)):
        assert_same(model, run, model.call(*sizes))


@pytest.mark.parametrize("options", [{"width": 6}, {"value_width": 4}])
def test_sizes_that_onnxruntime_has_no_kernel_for_prompts_of(options):
    model = Layer(**options)
    nodes, run = fused(model, model.call(2, 3, 5), LAYER_AXES)
    assert "If" not in nodes
    for sizes in ((2, 3, 0), (1, 1, 7)):
        assert_same(model, run, model.call(*sizes))


@pytest.mark.parametrize("hidden", [LOWEST, -torch.inf, -1e4])
def test_masks_of_numbers_are_added(hidden):
    model = Cached(scale=0.7)

    def call(batch, tokens, past):
        args = cached_call(batch, tokens, past)
        mask = torch.randn(batch, 1, tokens, past + tokens).masked_fill(~args[-1], hidden)
        mask[0, :, -1] = hidden
        return *args[:-1], mask

    nodes, run = fused(model, call(2, 3, 5), AXES)
    assert len(nodes["Attention"]) == 1
    for sizes in ((2, 3, 5), (1, 1, 7), (3, 4, 0)):
        assert_same(model, run, call(*sizes))


def test_a_mask_for_all_queries_is_repeated():
    model = Cached()

    def call(batch, tokens, past):
        return cached_call(batch, tokens, past, torch.rand(batch, 1, 1, past + tokens) > 0.3)

    nodes, run = fused(model, call(2, 3, 5), (*AXES[:-1], {0: "b", 3: "p+s"}))
    assert len(nodes["Attention"]) == 1
    for sizes in ((2, 3, 5), (3, 1, 2), (1, 4, 0)):
        assert_same(model, run, call(*sizes))


class Window(Cached):
    """Stores only the last four keys, which it cuts from all of them before it attends."""

    def forward(self, heads, past_key, past_value, mask):
        query, key, value = heads.split([4, 2, 2], 1)
        keys, values = torch.cat([past_key, key], -2), torch.cat([past_value, value], -2)
        stored = keys[:, :, -4:], values[:, :, -4:]
        repeated = [part.repeat_interleave(2, 1) for part in (keys, values)]
        return functional.scaled_dot_product_attention(query, *repeated, mask), *stored


def test_keys_that_something_else_reads_before_are_appended_outside():
    model = Window()
    nodes, run = fused(model, cached_call(2, 5, 6), AXES)
    (attention,) = nodes["Attention"]
    assert len(attention.inputs) == 4
    assert not {"Tile", "Expand"} & nodes.keys()
    for sizes in ((2, 5, 6), (1, 4, 3), (3, 1, 8)):
        assert_same(model, run, cached_call(*sizes))


class Unused(Cached):
    """A cache that begins with a tensor without axes, as in transformers."""

    def forward(self, heads):
        return super().forward(heads, torch.tensor([]), torch.tensor([]), None)


def test_a_cache_that_is_only_begun_stays_outside():
    nodes, run = fused(Unused(), (torch.randn(2, 8, 3, 8),), ({0: "b", 2: "s"},))
    assert len(nodes["Attention"]) == 1
    assert_same(Unused(), run, (torch.randn(3, 8, 5, 8),))


class Cross(torch.nn.Module):
    """Attention to the states of an encoder, which are computed once: with a cache, there are no new ones."""

    def forward(self, query, key, value, past_key, past_value):
        keys, values = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
        return functional.scaled_dot_product_attention(query, keys, values), keys, values


def test_a_cross_attention_may_have_no_new_keys():
    model = Cross()

    def call(batch, tokens, new, past):
        return torch.randn(batch, 4, tokens, 8), *(torch.randn(batch, 4, size, 8) for size in (new, new, past, past))

    nodes, run = fused(model, call(2, 3, 5, 7), ({0: "b", 2: "s"}, *({0: "b", 2: size} for size in "nnpp")))
    assert len(nodes["Attention"]) == 1
    for sizes in ((2, 3, 5, 7), (1, 1, 0, 6), (3, 2, 4, 0)):
        assert_same(model, run, call(*sizes))


class Causal(torch.nn.Module):
    def forward(self, query, key):
        return functional.scaled_dot_product_attention(query, key, key, is_causal=True)


def test_causal_attention_counts_from_the_first_key():
    model = Causal()
    nodes, run = fused(model, (torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)), ({0: "b", 2: "s"}, {0: "b", 2: "t"}))
    assert len(nodes["Attention"]) == 1
    for tokens, keys in ((5, 7), (3, 3), (6, 4), (1, 5)):
        assert_same(model, run, (torch.randn(3, 4, tokens, 8), torch.randn(3, 4, keys, 8)))


class Attend(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, query, key):
        return functional.scaled_dot_product_attention(query, key, key, **self.options)


def test_double_precision_stays_as_it_is():
    args = torch.randn(2, 4, 3, 8).double(), torch.randn(2, 4, 5, 8).double()
    nodes, run = fused(Attend(), args, ({0: "b"}, {0: "b"}))
    assert "Attention" not in nodes
    assert_same(Attend(), run, args)


@pytest.mark.parametrize(("shape", "options"), [((2, 4, 3, 8), {"scale": -0.5}), ((2, 3, 4, 3, 8), {})])
def test_what_the_kernel_does_not_take_is_not_fused(shape, options):
    program = torch.export.export(Attend(**options), (torch.randn(shape), torch.randn(shape)))
    assert with_whole_attention(program, []) is program


def test_attention_that_may_get_nothing_stays_as_it_is():
    program = torch.export.export(
        Attend(),
        (torch.randn(2, 4, 3, 8), torch.randn(2, 4, 5, 8)),
        dynamic_shapes=dynamic(({0: "b", 2: "s"}, {0: "b"})),
    )
    query = next(node for node in program.graph.nodes if node.name == "query").meta["val"]
    batch, tokens = (query.shape[axis].node.expr for axis in (0, 2))
    for zeros, whole in (([], True), ([{batch: 0}], False), ([{tokens: 0}], False)):
        targets = [str(node.target) for node in with_whole_attention(program, zeros).graph.nodes]
        assert ("exportkit.attention.default" in targets) is whole


def test_a_program_with_whole_attention_computes_the_same_in_torch():
    args = cached_call(2, 3, 5)
    program = torch.export.export(Cached(), args, dynamic_shapes=dynamic(AXES))
    whole = with_whole_attention(program, [])
    assert any("cached_attention" in str(node.target) for node in whole.graph.nodes)
    args = cached_call(3, 4, 2)
    for one, other in zip(program.module()(*args), whole.module()(*args), strict=True):
        torch.testing.assert_close(one, other)


class Written(torch.nn.Module):
    """Attention in single steps, over a cache."""

    def __init__(self, hide, softcap=None):
        super().__init__()
        self.hide, self.softcap = hide, softcap

    def forward(self, heads, past_key, past_value, mask):
        query, key, value = heads.split([4, 2, 2], 1)
        keys, values = torch.cat([past_key, key], -2), torch.cat([past_value, value], -2)
        key, value = (part.repeat_interleave(2, 1) for part in (keys, values))
        scores = torch.matmul(query, key.transpose(2, 3)) * 0.3
        if self.softcap:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        weights = functional.dropout(self.hide(scores, mask).softmax(-1), 0.1, self.training)
        return torch.matmul(weights, value), keys, values


def hidden_by(number):
    return lambda scores, mask: scores + torch.where(mask, 0.0, number)


HIDDEN = {
    "added": hidden_by(LOWEST),
    "added infinity": hidden_by(-torch.inf),
    "filled": lambda scores, mask: scores.masked_fill(~mask, -torch.inf),
    "filled with the smallest number": lambda scores, mask: scores.masked_fill(~mask, LOWEST),
}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", HIDDEN)
def test_attention_in_single_steps_becomes_one_operator(name, softcap):
    model = Written(HIDDEN[name], softcap)
    nodes, run = fused(model, cached_call(2, 3, 5), AXES)
    (attention,) = nodes["Attention"]
    assert len(attention.inputs) == 6
    assert "Softmax" not in nodes
    for sizes in ((2, 3, 5), (3, 1, 1), (1, 4, 0)):
        call = cached_call(*sizes)
        call[-1][0, :, -1] = False  # an average of all values, or not a number
        assert_same(model, run, call)


UNLIKE = {
    "the weights are used": lambda scores, mask: scores,
    "a mask of integers is added": lambda scores, mask: scores + mask,
    "scores are clamped": lambda scores, mask: scores.clamp(max=1.0).masked_fill(~mask, -torch.inf),
    "some are hidden less": lambda scores, mask: scores.masked_fill(~mask, -3.0),
    "more than the mask is added": lambda scores, mask: scores.add(mask.float(), alpha=2),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_is_not_quite_attention_stays_as_it_is(name):
    class Model(Written):
        def forward(self, heads, past_key, past_value, mask):
            results = super().forward(heads, past_key, past_value, mask)
            return (*results, self.scores.sum()) if name == "the weights are used" else results

        def keep(self, scores, mask):
            self.scores = scores
            return UNLIKE[name](scores, mask)

    model = Model(None)
    model.hide = model.keep
    args = cached_call(2, 3, 5)
    program = torch.export.export(model, args, dynamic_shapes=dynamic(AXES))
    assert with_whole_attention(program, []) is program


class Learned(torch.nn.Module):
    """Attention of each row of a batch to the same keys, or from the same queries."""

    def __init__(self, queries, steps):
        super().__init__()
        self.own, self.queries, self.steps = torch.nn.Parameter(torch.randn(1, 2, 3, 8)), queries, steps

    def forward(self, heads):
        query, key = (self.own, heads) if self.queries else (heads, self.own)
        if not self.steps:
            return functional.scaled_dot_product_attention(query, key, key)
        return torch.matmul(torch.matmul(query, key.transpose(2, 3)).softmax(-1), key)


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("queries", [True, False])
def test_learned_keys_and_queries_are_for_the_whole_batch(queries, steps):
    model = Learned(queries, steps)
    _, run = fused(model, (torch.randn(2, 2, 5, 8),), ({0: "b", 2: "s"},))
    for batch, tokens in ((2, 5), (3, 4), (1, 1)):
        assert_same(model, run, (torch.randn(batch, 2, tokens, 8),))


def test_a_scale_in_two_steps_is_their_product():
    class Model(Written):
        def forward(self, query, key, value):
            return torch.matmul((torch.matmul(query, key.transpose(2, 3)) / 2.0 * 0.3).softmax(-1), value)

    args = tuple(torch.randn(2, 4, 5, 8) for _ in range(3))
    nodes, run = fused(Model(None), args, ({0: "b", 2: "s"},) * 3)
    assert "Attention" in nodes
    assert_same(Model(None), run, args)


class ViewedAfterwards(torch.nn.Module):
    """Attention whose result is added to a contiguous tensor, copied in another order of axes, and viewed."""

    def forward(self, query, mask):
        turned = (query + functional.scaled_dot_product_attention(query, query, query, mask)).transpose(1, 2)
        return turned.clone(memory_format=torch.contiguous_format).view(query.shape[0], -1, 32)


class WrittenAndViewed(torch.nn.Module):
    """Written attention, whose result is contiguous and viewed as it is."""

    def forward(self, query, mask):
        weights = (query @ query.transpose(-1, -2) * 0.5 + mask).softmax(-1)
        return (weights @ query).view(query.shape[0], -1, 8)


@pytest.mark.parametrize("model", [ViewedAfterwards(), WrittenAndViewed()], ids=lambda model: type(model).__name__)
def test_results_of_attention_are_viewed_in_any_layout(model):
    def call(batch, tokens):
        return torch.randn(batch, 4, tokens, 8), torch.randn(batch, 1, tokens, tokens)

    nodes, run = fused(model, call(2, 5), ({0: "b", 2: "s"}, {0: "b", 2: "s", 3: "s"}))
    assert len(nodes["Attention"]) == 1
    for batch, tokens in ((2, 5), (1, 1), (3, 7)):
        assert_same(model, run, call(batch, tokens))


def test_keys_and_values_may_have_different_numbers_of_heads():
    class Model(torch.nn.Module):
        def forward(self, query, key, value):
            parts = key.repeat_interleave(2, 1), value.repeat_interleave(4, 1)
            return functional.scaled_dot_product_attention(query, *parts)

    def call(batch, tokens):
        return tuple(torch.randn(batch, heads, tokens, 8) for heads in (4, 2, 1))

    nodes, run = fused(Model(), call(2, 5), ({0: "b", 2: "s"},) * 3)
    assert "Attention" in nodes
    assert_same(Model(), run, call(3, 7))
