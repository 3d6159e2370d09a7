"""What torch.export and torch.onnx.export do, as far as exportkit is built on it. A failure here means: think again."""

import contextlib
import logging

import pytest
import torch
import torch.fx.experimental._config

from tests.models import Add, OptionalAdd, tiny_llama

D = torch.export.Dim.DYNAMIC
AUTO = torch.export.Dim.AUTO


class Concatenates(torch.nn.Module):
    def forward(self, past, new, mask):
        return torch.cat([past, new], dim=1) * mask


class Totals(torch.nn.Module):
    def forward(self, x, y):
        return x.sum() + y.sum()


class Unbinds(torch.nn.Module):
    def forward(self, x):
        return torch.stack(list(x))


class Branches(torch.nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class First(torch.nn.Module):
    def forward(self, x):
        return x[0] * 2


class Caught(torch.nn.Module):
    def forward(self, x, **kwargs):
        return x + kwargs["y"]


def _shapes(program):
    """Shapes of the inputs as text, such as ``("s0", "4")``."""
    names = program.graph_signature.user_inputs
    nodes = {node.name: node for node in program.graph.nodes}
    return [tuple(map(str, nodes[name].meta["val"].shape)) for name in names]


@contextlib.contextmanager
def _quiet():
    """Hides what torch logs of an export that is meant to fail."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("size", [0, 1])
def test_dynamic_axis_of_size_zero_or_one_is_refused(size):
    with pytest.raises(ValueError, match=f"export 0/1 specialized due to hint of {size}"):
        torch.export.export(torch.nn.ReLU(), (torch.ones(3, size),), dynamic_shapes=({1: D},))


def test_size_one_that_is_accepted_obliviously_narrows_the_range():
    ids = torch.tensor([[5, 6, 7, 8]])
    shapes = {"input_ids": {0: D, 1: D}, "use_cache": None}
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        program = torch.export.export(tiny_llama(), (), {"input_ids": ids, "use_cache": False}, dynamic_shapes=shapes)

    batch, _ = program.range_constraints.values()
    assert (batch.lower, batch.upper) == (1, 2)


def test_distinct_sizes_greater_than_one_give_free_axes():
    program = torch.export.export(
        tiny_llama(),
        (),
        {"input_ids": torch.ones(3, 5, dtype=torch.int64), "use_cache": False},
        dynamic_shapes={"input_ids": {0: D, 1: D}, "use_cache": None},
    )
    limits = list(program.range_constraints.values())
    assert len(limits) == 2
    assert all(limit.upper > 10**6 for limit in limits)


def test_sum_of_two_axes_is_found_under_dynamic():
    example = (torch.ones(2, 5), torch.ones(2, 4), torch.ones(2, 9))
    program = torch.export.export(Concatenates(), example, dynamic_shapes=({0: D, 1: D},) * 3)
    (batch, past), (_, new), (_, total) = _shapes(program)

    assert total in (f"{past} + {new}", f"{new} + {past}")
    assert batch not in (past, new)


def test_axes_of_equal_size_are_tied_under_auto_only_by_use():
    example = (torch.ones(4), torch.ones(4))
    apart = torch.export.export(Totals(), example, dynamic_shapes=({0: D}, {0: D}))
    used = torch.export.export(Add(), example, dynamic_shapes=({0: D}, {0: D}))

    assert len(set(_shapes(apart))) == 2
    assert len(set(_shapes(used))) == 1


def test_size_that_equals_a_constant_of_the_model_is_frozen():
    class AddsFour(torch.nn.Module):
        def forward(self, x):
            return x + torch.ones(4)

    with pytest.raises(Exception, match="specialized it to be a constant"), _quiet():
        torch.export.export(AddsFour(), (torch.ones(4),), dynamic_shapes=({0: D},))


def test_unbinding_a_dynamic_axis_freezes_it():
    with pytest.raises(Exception, match="specialized it to be a constant"), _quiet():
        torch.export.export(Unbinds(), (torch.ones(4, 3),), dynamic_shapes=({0: D},))


def test_branch_on_a_value_cannot_be_traced():
    with pytest.raises(Exception, match="data-dependent"), _quiet():
        torch.export.export(Branches(), (torch.ones(4),), dynamic_shapes=({0: D},))


def test_dynamic_shapes_must_name_every_argument():
    with pytest.raises(Exception, match="top-level keys must be the arg names"):
        torch.export.export(Add(), (), {"x": torch.ones(2), "y": torch.ones(2)}, dynamic_shapes={"x": {0: D}})


def test_list_of_one_tensor_is_still_a_list_in_the_dynamic_shapes():
    torch.export.export(First(), (), {"x": [torch.ones(4)]}, dynamic_shapes={"x": [{0: D}]})
    with pytest.raises(Exception, match="mismatch between the structure"):
        torch.export.export(First(), (), {"x": [torch.ones(4)]}, dynamic_shapes={"x": {0: D}})


@pytest.mark.parametrize("value", [torch.ones(4), 3])
@pytest.mark.parametrize("named", [True, False])
def test_values_that_kwargs_catches_cannot_be_exported(value, named):
    spec = {0: D} if isinstance(value, torch.Tensor) else None
    shapes = {"x": {0: D}, "kwargs": {"y": spec}} if named else {"x": {0: D}, "y": spec}
    with pytest.raises(Exception, match=r"Must provide a tree_name|top-level keys must be the arg names"):
        torch.export.export(Caught(), (), {"x": torch.ones(4), "y": value}, dynamic_shapes=shapes)


def test_sum_of_two_named_dimensions_cannot_be_written():
    with pytest.raises(NotImplementedError, match="where an integer was expected"):
        torch.export.Dim("past") + torch.export.Dim("new")


def test_additional_inputs_must_have_the_same_arguments():
    inputs = torch.export.AdditionalInputs()
    inputs.add((torch.ones(2), torch.ones(2)), {})
    inputs.add((torch.ones(3),), {})
    with pytest.raises(ValueError, match="arity mismatch"):
        torch.export.export(OptionalAdd(), (torch.ones(4), torch.ones(4)), dynamic_shapes=inputs)


def test_program_refuses_a_call_of_another_structure():
    program = torch.export.export(First(), ([torch.ones(4)],), dynamic_shapes=([{0: D}],))
    with pytest.raises(ValueError, match="exported input tree spec"):
        program.module()([torch.ones(4), torch.ones(4)])


def _onnx_axes(*shapes):
    """Names of the input axes after an ONNX export with these dynamic shapes."""
    example = (torch.ones(2, 5), torch.ones(2, 4), torch.ones(2, 9))
    with _quiet():
        program = torch.onnx.export(Concatenates().eval(), example, dynamic_shapes=shapes, verbose=False)
    return [[str(size) for size in value.shape] for value in program.model.graph.inputs]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_onnx_export_takes_names_and_sums_of_names():
    axes = _onnx_axes({0: "batch", 1: "past"}, {0: "batch", 1: "new"}, {0: "batch", 1: "past+new"})

    assert axes == [["batch", "past"], ["batch", "new"], ["batch", "past+new"]]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_onnx_export_warns_of_one_name_for_axes_that_are_tied():
    with pytest.warns(UserWarning, match="The axis name: batch will not be used"):
        _onnx_axes({0: "batch", 1: "past"}, {0: "batch", 1: "new"}, {0: "batch", 1: "total"})
