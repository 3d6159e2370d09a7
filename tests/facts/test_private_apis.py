"""Every private API that exportkit uses is there and does what its one function says."""

import optree
import pytest
import sympy
import torch

from exportkit._torch_compat import require
from exportkit._torch_compat.memory import StorageRef, memory_state, scientific_text
from exportkit._torch_compat.modules import paths_of_modules, put_hooks_in_trace, take_hooks_in_trace
from exportkit._torch_compat.onnx import (
    exact_no_ops,
    limits_kept,
    limits_with_names,
    quick_matches,
    slices_kept,
    tables_kept,
    versions_inside,
)
from exportkit._torch_compat.pytree import deregister_node, key_name, register_node, registered_node, tree_leaves
from exportkit._torch_compat.rounding import rounding_varied
from exportkit._torch_compat.symbolic_shapes import input_axes, shape_guards, source_names, with_ranges
from exportkit._torch_compat.tracing import apart_from_modes, in_backward, is_tracing, watched_symbols
from exportkit._torch_compat.transformers import (
    attention_implementation,
    attention_property,
    cache_bases,
    causal_mask_shortcut,
    set_attention_implementation,
)
from exportkit.errors import CompatibilityError


class Node:
    def __init__(self, leaves):
        self.leaves = leaves


def _register(cls=Node):
    register_node(
        cls,
        lambda node: (list(node.leaves), "context"),
        lambda leaves, _: cls(list(leaves)),
        lambda node: [f"leaf_{i}" for i in range(len(node.leaves))],
        lambda context: [context],
        lambda data: data[0],
    )


def test_class_is_registered_and_taken_back_everywhere():
    assert registered_node(Node) is None
    _register()
    node = registered_node(Node)
    leaves, structure = torch.utils._pytree.tree_flatten(Node([1, 2]))

    assert node.flatten(Node([1, 2])) == ([1, 2], "context")
    assert leaves == optree.tree_leaves(Node([1, 2]), namespace="torch") == [1, 2]
    assert torch.utils._pytree.treespec_loads(torch.utils._pytree.treespec_dumps(structure)) == structure
    assert [key_name(key) for key, _ in node.flatten_with_keys(Node([1, 2]))[0]] == ["leaf_0", "leaf_1"]
    deregister_node(Node)
    assert registered_node(Node) is None
    assert Node not in optree.register_pytree_node.get(namespace="torch")
    _register()
    deregister_node(Node)


def test_class_that_somebody_took_out_of_optree_can_still_be_taken_back():
    _register()
    optree.unregister_pytree_node(Node, namespace="torch")
    deregister_node(Node)

    assert registered_node(Node) is None


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (torch.utils._pytree.MappingKey("a"), "a"),
        (torch.utils._pytree.SequenceKey(3), 3),
        (torch.utils._pytree.GetAttrKey("b"), "b"),
        (torch.utils._pytree.MappingKey((1, 2)), "(1, 2)"),
    ],
)
def test_key_of_a_leaf_has_a_name(key, name):
    assert key_name(key) == name


def test_leaves_come_in_the_order_of_torch():
    assert tree_leaves({"b": [1, None], "a": (2,)}) == [1, None, 2]


def test_tracing_is_noticed():
    seen = []

    class Looks(torch.nn.Module):
        def forward(self, x):
            seen.append(is_tracing())
            return x + 1

    model = Looks()
    model(torch.ones(2))
    torch.export.export(model, (torch.ones(2),))
    with torch._subclasses.FakeTensorMode():
        model(torch.ones(2))
    model(torch.ones(2))

    assert seen[0] is False
    assert seen[-1] is False
    assert len(seen) > 2
    assert all(seen[1:-1])


def test_sizes_of_a_program_are_read():
    class Doubles(torch.nn.Module):
        def forward(self, x):
            return torch.cat([x, x])

    dynamic = {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(Doubles(), (torch.ones(4, 3),), dynamic_shapes=(dynamic,))
    sizes = input_axes(program)

    rows, columns = sizes["x"]
    assert isinstance(rows, sympy.Symbol)
    assert columns == 3
    assert str(next(node for node in program.graph.nodes if node.name == "cat").meta["val"].shape[0]) == f"2*{rows}"


class Decides(torch.nn.Module):
    """Decides by a size, and by how two sizes are related."""

    def forward(self, x, y):
        return x.sum() if x.shape[0] > 3 and x.shape[0] * 2 == y[0].shape[0] else y[0].sum()


_INPUTS = {"x": torch.ones(5, 2), "y": [torch.ones(10)]}
_FREE = {"x": {0: torch.export.Dim.DYNAMIC}, "y": [{0: torch.export.Dim.DYNAMIC}]}


def test_symbols_of_a_program_get_other_bounds_which_a_file_keeps(tmp_path):
    dynamic = torch.export.Dim.DYNAMIC
    program = torch.export.export(torch.nn.ReLU(), (torch.ones(3, 4),), dynamic_shapes=({0: dynamic, 1: dynamic},))
    first, second = input_axes(program)["input"]
    assert (program.range_constraints[first].lower, program.range_constraints[second].lower) in ((0, 0), (2, 2))
    torch.export.save(with_ranges(program, {first: (0, None), second: (1, 9)}), tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    assert {(limit.lower, min(limit.upper, 99)) for limit in loaded.range_constraints.values()} == {(0, 99), (1, 9)}
    assert loaded.module()(torch.ones(0, 1)).shape == (0, 1)


def test_a_trace_tells_which_symbol_a_size_gets_and_what_becomes_of_it():
    messages = []
    with watched_symbols(lambda message, arguments: messages.append((message, arguments))):
        torch.export.export(Decides(), (), kwargs=_INPUTS, dynamic_shapes=_FREE)
    created = {str(a[2]): str(a[0]) for m, a in messages if m.startswith("create_symbol %s = %s for %s")}
    replaced = {str(a[0]): str(a[1]) for m, a in messages if m.startswith("set_replacement %s = %s")}
    assert list(created) == ["L['x'].size()[0]", "L['y'][0].size()[0]"]
    x, y = created.values()
    assert replaced == {y: f"2*{x}"}


def test_the_names_that_messages_use_are_known():
    assert source_names(_INPUTS) == ["L['x']", "L['y'][0]"]


def test_what_a_trace_took_for_granted_is_read_with_its_line():
    program = torch.export.export(Decides(), (), kwargs=_INPUTS, dynamic_shapes=_FREE)
    (x, columns), (y,) = input_axes(program).values()
    assert columns == 2
    assert y == 2 * x
    larger, related = shape_guards(program)
    assert larger.asked == larger.left == (x > 3)
    assert related.left == sympy.true
    assert {guard.file for guard in (larger, related)} == {__file__}


def test_base_classes_of_caches_are_found():
    from transformers import cache_utils

    assert cache_bases() == (
        cache_utils.Cache,
        cache_utils.CacheLayerMixin,
        cache_utils.LinearAttentionCacheLayerMixin,
        cache_utils.DummyLayer,
    )


def test_transformers_asks_one_function_whether_a_causal_mask_is_needed():
    import transformers.masking_utils

    owner, name = causal_mask_shortcut()
    assert owner is transformers.masking_utils
    assert getattr(owner, name)(None, 3, 3, 0, 0) is True


def test_private_api_that_is_gone_is_named_with_the_version():
    with pytest.raises(
        CompatibilityError, match=r"torch\.utils\._pytree\.not_there does not exist in this version"
    ) as raised:
        require(torch.utils._pytree, "not_there", "torch 2.13")
    assert f"got: torch {torch.__version__}" in str(raised.value)


def test_a_backward_pass_is_recognised():
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(in_backward())
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            seen.append(in_backward())
            return gradient

    Function.apply(torch.ones(1, requires_grad=True)).backward()

    assert [*seen, in_backward()] == [False, True, False]


def test_hooks_of_a_trace_enclose_those_of_a_module_and_leave_it_as_it_was():
    order = []
    module = torch.nn.Identity()
    module.register_forward_pre_hook(lambda *_: order.append("own before"))
    module.register_forward_hook(lambda *_: order.append("own after"))
    before = list(vars(module).items())
    tables = put_hooks_in_trace(
        module,
        lambda _module, args, kwargs: order.append("before"),
        lambda _module, args, kwargs, _: order.append("after"),
    )
    module(1)
    take_hooks_in_trace(module, tables)

    assert order == ["before", "own before", "own after", "after"]
    assert all(vars(module)[name] is value for name, value in before)


def test_a_config_says_which_attention_is_computed_by_a_property():
    from transformers import LlamaConfig

    config = LlamaConfig(attn_implementation="sdpa")
    cls, attribute = attention_property(config)
    assert attention_implementation(config) == attribute.fget(config) == "sdpa"
    assert vars(cls)["_attn_implementation"] is attribute
    set_attention_implementation(config, "eager")
    assert attention_implementation(config) == "eager"
    assert attention_implementation(None) is None
    assert attention_property(None) is None


def test_paths_of_modules_are_those_of_torch():
    shared = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(torch.nn.Sequential(shared, torch.nn.ReLU()), shared, torch.nn.ModuleList([shared]))
    model.register_module("absent", None)
    expected = {}
    for path, module in model.named_modules(remove_duplicate=False):
        expected.setdefault(module, []).append(path)
    assert paths_of_modules(model) == expected
    assert list(paths_of_modules(model)) == list(expected)


def test_memory_is_told_apart_without_being_held():
    x = torch.ones(3)
    number, version = memory_state(x)
    assert memory_state(x[1:]) == (number, version)
    x += 1
    assert memory_state(x) == (number, version + 1)
    with torch.inference_mode():
        assert memory_state(torch.ones(3))[1] is None
    ref = StorageRef(x)
    assert not ref.is_gone()
    del x
    assert ref.is_gone()
    others = [torch.ones(3) for _ in range(100)]
    assert number not in [memory_state(other)[0] for other in others]


def test_modes_do_not_see_what_is_done_apart_from_them():
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.device("meta"), torch.autocast("cpu"):
        with apart_from_modes():
            product = torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)
        assert (product.device.type, product.dtype, product.requires_grad) == ("cpu", torch.float32, False)
    assert counter.get_total_flops() == 0


def test_tensors_are_printed_in_scientific_notation_and_the_options_stay():
    x = torch.tensor([1000.5])
    assert scientific_text(x) == "tensor([1.0005e+03])"
    assert repr(x) == "tensor([1000.5000])"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64])
def test_operators_can_round_differently(dtype):
    x, weight = torch.randn(40, 40).to(dtype), torch.randn(40, 40).to(dtype)
    with rounding_varied(0, [weight]):
        product, total = x @ weight, x.clone().add_(x)
    far = (product - x @ weight).abs().max() / (x @ weight).abs().max()

    assert 0 < far.item() < 8 * torch.finfo(dtype).eps
    assert not torch.equal(total, x + x)
    assert torch.allclose(total, x + x, rtol=4 * torch.finfo(dtype).eps)


def test_sparse_weights_are_left_as_they_are_where_operators_round_differently():
    weight, x = torch.eye(3).to_sparse(), torch.randn(3, 2)
    with rounding_varied(0, [weight]):
        product = torch.sparse.mm(weight, x)
    assert torch.allclose(product, x)
    assert not torch.equal(product, x)


def test_evenly_spaced_numbers_can_round_differently():
    with rounding_varied(0):
        numbers, places = torch.linspace(-1, 1, 9), torch.linspace(0, 31, 8)

    assert numbers[4] != 0
    assert numbers.tolist() == pytest.approx(torch.linspace(-1, 1, 9).tolist(), abs=2e-7)
    assert (numbers[0], numbers[-1], places[0], places[-1]) == (-1, 1, 0, 31)


def test_what_is_exact_stays_exact_where_operators_round_differently():
    x, ids = torch.randn(5, 7), torch.arange(7)
    with rounding_varied(0) as rounding, torch.no_grad():
        moved = torch.cat([x.t().reshape(7, 5), x.t()], 1)[ids].clone()
        counts = (torch.ones(5, 7) * 3).sum(1)
        masks = torch.zeros(2, 2).masked_fill(torch.eye(2) == 1, -torch.inf) + 0

    assert torch.equal(moved, torch.cat([x.t().reshape(7, 5), x.t()], 1))
    assert counts.tolist() == [21.0] * 5
    assert masks.tolist() == [[-torch.inf, 0.0], [0.0, -torch.inf]]
    assert not rounding.chooses


@pytest.mark.parametrize(
    "changes",
    [exact_no_ops, limits_kept, limits_with_names, quick_matches, slices_kept, tables_kept, versions_inside],
)
def test_what_is_changed_in_the_translation_to_onnx_is_there(changes):
    found = changes()

    assert found
    assert all(hasattr(owner, name) for owner, attributes in found for name in attributes)


@pytest.mark.parametrize("largest", [True, False])
def test_ties_can_be_broken_as_onnx_does(largest):
    x = torch.tensor([[2.0, 1, 2, 1, 2, 1, 1, 2]])
    expected = [0, 2, 4] if largest else [1, 3, 5]
    with rounding_varied(0, errors=0.0) as rounding:
        values, indices = x.topk(3, largest=largest)
        ordered = x.argsort(descending=largest)

    assert indices.tolist() == [expected]
    assert values.tolist() == [[2.0] * 3 if largest else [1.0] * 3]
    assert ordered[0, :3].tolist() == expected
    assert rounding.chooses
