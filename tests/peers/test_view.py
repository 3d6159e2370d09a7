"""`observer.info` has the names that code written for ``torch.onnx.InputObserver`` uses."""

import torch
from torch.onnx import InputObserver as TorchObserver

from exportkit import InputObserver
from tests.models import Add, IdsDecoder, OptionalAdd, Scale, random_cache, random_ids
from tests.peers.test_dynamic_shapes import calls, ones


def test_length_is_the_number_of_calls():
    observer = calls(Add(), ((ones(2), ones(2)), {}), ((ones(3), ones(3)), {}))

    assert len(observer.info) == len(observer.info.inputs) == observer.num_obs() == 2


def test_flat_list_has_the_tensors_of_the_call():
    every = [((random_ids(1, 2),), {"past_key_values": random_cache(n, layers=1)}) for n in (3, 4)]
    first, second = calls(IdsDecoder(), *every).info.inputs

    assert [tuple(tensor.shape) for tensor in first.flat_list] == [(1, 2), (1, 4, 3, 32), (1, 4, 3, 32)]
    assert len(first) == 3
    assert torch.equal(second.flat_list[1], every[1][1]["past_key_values"].layers[0].keys)


def test_aligned_list_has_none_for_what_the_call_lacks():
    observer = calls(OptionalAdd(), ((ones(2), ones(3)[:2]), {}), ((ones(4),), {}))
    second = observer.info.inputs[1]

    assert [None if t is None else len(t) for t in second.aligned_flat_list] == [4, None]
    assert second.n_aligned_tensors == 2
    assert len(second) == len(second.flat_list) == 1


def test_one_line_describes_the_call_with_its_constants():
    observer = calls(Scale(), ((ones(2), 3), {"negate": True}))

    assert observer.info.inputs[0].str_obs() == "call 0: dict(x:T1s2,factor:int,negate:bool)"


def test_arguments_are_those_that_were_given():
    observer = calls(OptionalAdd(), ((ones(2),), {"y": ones(2)}), ((ones(3),), {"y": None}))
    first, second = observer.info.inputs
    (scaled,) = calls(Scale(), ((ones(2), 3), {"negate": True})).info.inputs

    assert [arg.tolist() for arg in first.args] == [[1, 1]]
    assert {name: value.tolist() for name, value in first.kwargs.items()} == {"y": [1, 1]}
    assert (len(second.args), second.kwargs) == (1, {})
    assert (scaled.args[1], scaled.kwargs, scaled.cst_kwargs) == (3, {}, {"negate": True})


def test_outputs_come_flat_and_with_none():
    class Several(torch.nn.Module):
        def forward(self, x):
            return {"a": [x, None], "b": 3, "c": (x * 2,)}

    (outputs,) = calls(Several(), ((ones(2),), {})).info.flat_outputs

    assert [None if t is None else t.tolist() for t in outputs] == [[1, 1], None, [2, 2]]


def test_latencies_and_names_are_there():
    info = calls(Add(), ((ones(2), ones(2)), {}), ((ones(2), ones(2)), {})).info

    assert len(info.latencies) == 2
    assert min(info.latencies) > 0
    assert info.signature_names == ["x", "y"]


def test_values_are_those_that_the_observer_of_torch_has():
    model, ours, theirs = OptionalAdd(), InputObserver(), TorchObserver()
    with ours(model), theirs(model):
        model(ones(5, 6), ones(1, 6))
        model(ones(6, 7), ones(1, 7))
        model(ones(7, 8))
    theirs.infer_dynamic_shapes()  # aligns the calls

    assert ours.infer_dynamic_shapes() == theirs.infer_dynamic_shapes()
    assert len(ours.info) == len(theirs.info)
    assert ours.info.signature_names == theirs.info.signature_names
    for mine, other in zip(ours.info.inputs, theirs.info.inputs, strict=True):
        assert len(mine) == len(other)
        assert mine.n_aligned_tensors == other.n_aligned_tensors
        for a, b in zip(mine.aligned_flat_list, other.aligned_flat_list, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
    for mine, other in zip(ours.info.flat_outputs, theirs.info.flat_outputs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    for number in (0, 1, 2):
        pairs = zip(ours.infer_arguments(number), theirs.infer_arguments(number), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
