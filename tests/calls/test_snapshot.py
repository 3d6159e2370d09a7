"""Snapshots show values as they were, and whoever owns the tensors notices nothing.

The first part shows what torch's copy-on-write does: exportkit/calls/snapshot.py uses it only where that is safe.
"""

import ctypes
import pickle
import threading

import numpy as np
import pytest
import torch

from exportkit import InputObserver, make_dynamic_cache, make_static_cache
from exportkit._torch_compat.memory import copies_on_write, is_only_holder, memory_address
from exportkit.calls.snapshot import LARGE, Copying
from exportkit.trees.flatten import flattened
from tests.models import AddsInPlace, IdsDecoder, random_ids

BIG = LARGE // 4  # float32 elements of a large tensor


def big():
    return torch.arange(float(BIG))


def owned_cache():
    """Its tensors are nobody else's, as those that a cache made itself."""
    return make_dynamic_cache([(torch.rand(1, 1, BIG // 8, 8), torch.rand(1, 1, BIG // 8, 8)) for _ in range(2)])


def taken(value, inputs=None):
    """Returns the tensors of a snapshot of the value."""
    return list(Copying(flattened(value), inputs).snapshot().tree().tensors().values())


def shares(snapshot, tensor):
    return memory_address(snapshot) == memory_address(tensor)


def address(tensor):
    return memory_address(tensor)


def lazy(tensor):
    (copy,) = copies_on_write([tensor])
    assert copy is not None
    return copy


# What copy-on-write does


def test_the_one_that_is_written_moves_and_the_other_keeps_its_values():
    tensor = torch.arange(4.0)
    before, version = address(tensor), tensor._version
    copy = lazy(tensor)
    assert (address(tensor), address(copy), tensor._version) == (before, before, version)

    tensor.add_(1)
    assert address(tensor) != before
    assert address(copy) == before
    assert (tensor.tolist(), copy.tolist()) == ([1, 2, 3, 4], [0, 1, 2, 3])


def test_asking_for_the_address_moves_a_tensor():
    tensor = torch.arange(4.0)
    before = tensor.data_ptr()
    copy = lazy(tensor)

    assert copy.data_ptr() != before
    assert tensor.data_ptr() == before  # the only one left stays where it is
    again = lazy(tensor)
    assert tensor.data_ptr() != before
    assert again.tolist() == tensor.tolist()


def test_numpy_view_from_before_is_cut_off():
    tensor = torch.arange(4.0)
    view = tensor.numpy()
    copy = lazy(tensor)
    tensor.add_(1)

    assert view.tolist() == copy.tolist() == [0, 1, 2, 3]  # hence such tensors are never shared


def test_numpy_view_from_before_writes_into_the_copy():
    tensor = torch.arange(4.0)
    view = tensor.numpy()
    copy = lazy(tensor)
    view[0] = 9

    assert copy.tolist() == [9, 1, 2, 3]  # hence such tensors are never shared


def test_numpy_view_from_afterwards_leaves_the_copy_alone():
    tensor = torch.arange(4.0)
    copy = lazy(tensor)
    tensor.numpy()[0] = 9

    assert (tensor.tolist(), copy.tolist()) == ([9, 1, 2, 3], [0, 1, 2, 3])


@pytest.mark.parametrize(
    "write",
    [
        lambda t: torch.from_dlpack(t).zero_(),
        lambda t: np.from_dlpack(t).fill(0),
        lambda t: t.view(2, 2)[0].fill_(5),
        lambda t: t.view(torch.int32).zero_(),
        lambda t: t.index_copy_(0, torch.tensor([1]), torch.tensor([5.0])),
        lambda t: torch.add(torch.ones(4), 1, out=t),
        lambda t: t.untyped_storage().fill_(0),
        lambda t: t.resize_(8),
        lambda t: t.untyped_storage().resize_(64),
        lambda t: t.share_memory_().zero_(),
        lambda t: ctypes.memset(t.data_ptr(), 0, 16),
        lambda t: pickle.loads(pickle.dumps(t)).zero_(),
    ],
)
def test_no_later_write_reaches_the_copy(write):
    tensor = torch.arange(4.0)
    copy = lazy(tensor)
    write(tensor)

    assert copy.tolist() == [0, 1, 2, 3]


def test_views_and_their_base_move_together():
    base = torch.arange(4.0)
    view = base[2:]
    copy = lazy(base)
    view.zero_()

    assert (base.tolist(), copy.tolist()) == ([0, 1, 0, 0], [0, 1, 2, 3])


@pytest.mark.parametrize("kind", ["from_numpy", "frombuffer", "shared", "mmap"])
def test_memory_that_torch_did_not_allocate_cannot_be_shared(kind, tmp_path):
    assert copies_on_write([_foreign(kind, tmp_path)]) == [None]


def _foreign(kind, tmp_path):
    if kind == "from_numpy":
        return torch.from_numpy(np.zeros(BIG, "float32"))
    if kind == "frombuffer":
        return torch.frombuffer(bytearray(4 * BIG), dtype=torch.float32)
    if kind == "shared":
        return torch.zeros(BIG).share_memory_()
    return torch.from_file(str(tmp_path / "values"), shared=True, size=BIG)


def test_who_holds_the_memory_is_known():
    assert is_only_holder(torch.ones(3))
    numpy, dlpack, base = torch.ones(3), torch.ones(3), torch.ones(3)
    kept = numpy.numpy(), torch.from_dlpack(dlpack), base[1:]

    assert not any(map(is_only_holder, [numpy, dlpack, base, kept[2]]))


# What is shared, and what is copied


def test_values_of_a_growing_cache_are_shared():
    cache = owned_cache()
    copies = taken(cache)

    assert shares(copies[0], cache.layers[0].keys)
    assert shares(copies[3], cache.layers[1].values)


def test_fresh_results_are_shared_and_then_shared_again_as_inputs():
    result = big()
    (first,) = taken(result, frozenset())
    assert shares(first, result)
    (second,) = taken(result)
    assert shares(second, result)


def test_result_that_was_given_is_copied():
    tensor = big()
    (copy,) = taken(tensor, frozenset({id(tensor)}))

    assert not shares(copy, tensor)


def _with_numpy(tensor):
    return tensor, tensor.numpy()


def _with_dlpack(tensor):
    return tensor, torch.from_dlpack(tensor)


def _written(tensor):
    return tensor.add_(1), None


def _view(tensor):
    base = torch.arange(2.0 * BIG)
    return base[:BIG], base


@pytest.mark.parametrize("prepare", [_with_numpy, _with_dlpack, _written, _view])
def test_memory_that_somebody_may_hold_is_copied(prepare):
    tensor, kept = prepare(big())
    (copy,) = taken(tensor, frozenset())

    assert not shares(copy, tensor)
    assert torch.equal(copy, tensor)
    del kept


@pytest.mark.parametrize("kind", ["from_numpy", "frombuffer", "shared", "mmap"])
def test_memory_that_torch_did_not_allocate_is_copied(kind, tmp_path):
    tensor = _foreign(kind, tmp_path)
    (copy,) = taken(tensor, frozenset())
    tensor.add_(1)

    assert copy.sum() == 0


@pytest.mark.parametrize("large", [False, True])
def test_plain_inputs_keep_their_address_and_their_views(large):
    tensor = torch.zeros(BIG if large else 4)
    view, before = tensor.numpy(), tensor.data_ptr()
    model, observer = AddsInPlace(), InputObserver()
    with observer(model):
        model(tensor)
        model(tensor)

    assert tensor.data_ptr() == before
    assert view[0] == 2
    assert [call.tensors()["x"][0].item() for call in observer.observation.calls] == [0, 1]
    assert [call.outputs.leaves[0][0].item() for call in observer.observation.calls] == [1, 2]


def test_preallocated_cache_keeps_its_address():
    cache = make_static_cache([(torch.rand(1, 1, BIG // 8, 8), torch.rand(1, 1, BIG // 8, 8))])
    before = cache.layers[0].keys.data_ptr()
    model, observer = _WritesCache(), InputObserver()
    with observer(model):
        model(cache)
    (call,) = observer.observation.calls

    assert cache.layers[0].keys.data_ptr() == before
    assert call.tensors()["cache.layers[0].keys"].min() >= 0
    assert call.outputs.tensors()["layers[0].keys"].max() == -1


class _WritesCache(torch.nn.Module):
    def forward(self, cache):
        for layer in cache.layers:
            layer.keys.index_copy_(2, torch.arange(layer.keys.shape[2]), torch.full_like(layer.keys, -1))
        return cache


def test_growing_cache_that_a_model_writes_to_is_recorded_as_it_was():
    cache = owned_cache()
    keys = cache.layers[0].keys.clone()
    model, observer = _WritesCache(), InputObserver()
    with observer(model):
        model(cache)
    (call,) = observer.observation.calls
    cache.layers[0].keys.zero_()

    assert torch.equal(call.tensors()["cache.layers[0].keys"], keys)
    assert call.outputs.tensors()["layers[0].keys"].max() == -1


def test_reading_and_writing_a_snapshot_leaves_the_tensor_alone():
    cache = owned_cache()
    tensor = cache.layers[0].keys
    before, values = address(tensor), tensor.clone()
    copy = taken(cache)[0]
    copy.numpy().sum()
    copy.add_(1)

    assert address(tensor) == before
    assert torch.equal(tensor, values)


@pytest.mark.parametrize("missing", ["_lazy_clone", None])
def test_without_copy_on_write_all_is_copied(monkeypatch, missing):
    if missing:
        monkeypatch.delattr(torch, missing)
    else:
        monkeypatch.delattr(torch._C, "_storage_Use_Count")
    cache = owned_cache()
    keys = cache.layers[0].keys.clone()
    copy = taken(cache)[0]
    assert not shares(copy, cache.layers[0].keys)
    cache.layers[0].keys.zero_()

    assert torch.equal(copy, keys)


# Tensors of all kinds


def _quantized():
    return torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.quint8)


def _values(tensor):
    return (tensor.dequantize() if tensor.is_quantized else tensor.to_dense()).tolist()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(3),
        lambda: torch.empty(0),
        lambda: torch.ones(3, dtype=torch.bool),
        lambda: torch.ones(3).to(torch.float8_e4m3fn),
        lambda: torch.ones(1, 1).expand(5, 5),
        lambda: torch.arange(6.0).view(2, 3).t(),
        lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.rand(3, requires_grad=True),
        lambda: torch.nn.Parameter(torch.rand(3)),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.rand(3, 3).to_mkldnn(),
        lambda: torch.randn(3, dtype=torch.complex64).conj(),
        lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
        _quantized,
    ],
)
def test_copy_has_values_type_and_strides(make):
    tensor = make()
    for value in ([tensor], [tensor, make(), *[torch.rand(2) for _ in range(5)]]):
        copy = taken(value)[0]
        assert (copy.shape, copy.dtype, copy.layout) == (tensor.shape, tensor.dtype, tensor.layout)
        assert not copy.requires_grad
        if tensor.layout is torch.strided:
            assert copy.is_contiguous() or copy.stride() == tensor.stride()
        assert _values(copy) == _values(tensor)


def test_tensor_without_values_keeps_its_shape():
    copies = taken([torch.empty(3, device="meta") for _ in range(9)])

    assert {(copy.shape, copy.device.type) for copy in copies} == {((3,), "meta")}


def test_tensors_of_one_shape_on_several_devices_stay_there():
    tensors = [torch.ones(3), torch.empty(3, device="meta")] * 4

    assert [copy.device.type for copy in taken(tensors)] == ["cpu", "meta"] * 4


def test_types_are_not_mixed_up():
    tensors = [torch.ones(3), torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.float64)] * 4

    assert [copy.dtype for copy in taken(tensors)] == [tensor.dtype for tensor in tensors]


def test_layers_of_other_shapes_and_types_are_kept_apart():
    pairs = [(torch.rand(1, 2, n, 4), torch.rand(1, 2, n, 4)) for n in (3, 5, 3)]
    pairs[1] = pairs[1][0].double(), pairs[1][1]
    cache = make_dynamic_cache(pairs)
    tree = Copying(flattened(cache)).snapshot().tree()

    assert tree.paths[:2] == ("layers[0].keys", "layers[0].values")
    for copy, tensor in zip(tree.leaves, [tensor for pair in pairs for tensor in pair], strict=True):
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(copy, tensor)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_modes_of_the_caller_leave_no_trace_in_the_copies(mode, large):
    size = BIG // 8 if large else 3
    with mode():
        cache = make_dynamic_cache([(torch.rand(1, 1, size, 8), torch.rand(1, 1, size, 8)) for _ in range(3)])
        copies = taken(cache)

    assert not any(copy.is_inference() or copy.requires_grad for copy in copies)
    for copy in copies:
        copy.add_(1)
    assert torch.equal(copies[5], cache.layers[2].values + 1)


def test_gradients_flow_through_shared_results():
    weights = torch.rand(BIG, requires_grad=True)

    class Exp(torch.nn.Module):
        def forward(self, x):
            return x.exp()

    model, observer = Exp(), InputObserver()
    with observer(model):
        result = model(weights)
    result.sum().backward()

    assert torch.equal(weights.grad, weights.exp())
    assert torch.equal(observer.observation.calls[0].outputs.leaves[0], weights.exp())


def test_copies_of_one_call_can_be_changed_one_by_one():
    first, second, *_ = taken([torch.zeros(3) for _ in range(9)])
    first.add_(1)

    assert (first.tolist(), second.tolist()) == ([1, 1, 1], [0, 0, 0])


# Structures


def test_list_and_dict_that_change_during_the_call_are_recorded_as_they_were():
    class Changes(torch.nn.Module):
        def forward(self, data):
            data["list"].append(torch.zeros(1))
            data["new"] = data.pop("old")
            return data["new"] + 1

    model, observer = Changes(), InputObserver()
    with observer(model):
        model({"list": [torch.ones(2)], "old": torch.ones(3)})

    assert list(observer.observation.calls[0].tensors()) == ["data.list[0]", "data.old"]


def test_class_that_is_registered_later_stays_closed():
    class Box:
        def __init__(self, tensor):
            self.tensor, self.lock = tensor, threading.Lock()

    class Takes(torch.nn.Module):
        def forward(self, box):
            return box.tensor + 1

    model, observer, box = Takes(), InputObserver(), Box(torch.ones(2))
    with observer(model):
        model(box)
    torch.utils._pytree.register_pytree_node(Box, lambda b: ([b.tensor], None), lambda c, _: Box(*c))

    assert observer.observation.calls[0].constants() == {"box": box}


def test_cache_keeps_everything_else_that_it_has():
    cache = make_dynamic_cache([(torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 4)) for _ in range(3)], sliding_window=7)
    cache.layers[1].cumulative_length = 11
    model, observer = IdsDecoder(), InputObserver()
    with observer(model):
        model(random_ids(1, 2), past_key_values=cache)
    built = observer.observation.calls[0].values()["past_key_values"]

    assert type(built) is type(cache)
    assert [layer.cumulative_length for layer in built.layers] == [3, 11, 3]
    assert [vars(layer).keys() for layer in built.layers] == [vars(layer).keys() for layer in cache.layers]
    assert built.layers[2].get_mask_sizes(1) == cache.layers[2].get_mask_sizes(1)
