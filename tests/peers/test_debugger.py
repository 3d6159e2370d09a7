"""The files of transformers' debugger: the same as transformers writes, without the failures."""

import json
import sys
import threading

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from exportkit import Trace, model_addition_debugger_context
from exportkit.errors import DestinationError, InvalidTypeError
from tests.models import IMAGE_TOKEN, random_ids, tiny_llama, tiny_llava
from tests.module_traces.models import Block, Fails, Pair, Passes, Stack, in_threads

FILES = ("FULL_TENSORS", "SUMMARY")


def written(folder, name, file="FULL_TENSORS"):
    return json.loads((folder / f"{name}_debug_tree_{file}.json").read_text())


def nodes(node):
    yield node
    for child in node.get("children", ()):
        yield from nodes(child)


def keys(value):
    """The keys of nested dicts and lists, without what is in them."""
    if isinstance(value, dict):
        return {key: keys(item) for key, item in value.items()}
    return [keys(item) for item in value] if isinstance(value, list) else None


def multimodal_arguments():
    ids = torch.tensor([[1, *[IMAGE_TOKEN] * 4, 5, 6]])
    return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28), "attention_mask": torch.ones_like(ids)}


@pytest.fixture
def _own_print_options():
    """Those of the process are what transformers leaves changed."""
    yield
    torch.set_printoptions(profile="default", sci_mode=None)


def both(make, arguments, tmp_path, **options):
    """Runs a model in transformers' context and in ours, and returns the folders."""
    contexts = {"theirs": transformers.model_addition_debugger_context, "ours": model_addition_debugger_context}
    torch.manual_seed(0)
    state = make().state_dict()
    for name, context in contexts.items():
        model = make()
        model.load_state_dict(state)
        with context(model, str(tmp_path / name), **options):
            model.forward(**arguments)
    return tmp_path / "theirs", tmp_path / "ours"


@pytest.mark.usefixtures("_own_print_options")
@pytest.mark.parametrize("use_repr", [True, False])
@pytest.mark.parametrize("do_prune_layers", [True, False])
def test_a_multimodal_model_is_written_as_transformers_does_text_for_text(use_repr, do_prune_layers, tmp_path):
    arguments = {**multimodal_arguments(), "use_cache": False}
    theirs, ours = both(tiny_llava, arguments, tmp_path, use_repr=use_repr, do_prune_layers=do_prune_layers)

    for file in FILES:
        expected, found = (written(folder, "LlavaForConditionalGeneration", file) for folder in (theirs, ours))
        assert keys(found) == keys(expected)
        assert found == expected


@pytest.mark.usefixtures("_own_print_options")
def test_a_multimodal_model_with_a_cache_has_the_same_keys_but_for_the_cache_which_is_opened(tmp_path):
    theirs, ours = both(tiny_llava, multimodal_arguments(), tmp_path)

    pairs = zip(*(nodes(written(folder, "LlavaForConditionalGeneration")) for folder in (theirs, ours)), strict=True)
    opened = 0
    for expected, found in pairs:
        caches = [node["inputs"].get("kwargs", {}).pop("past_key_values", None) for node in (expected, found)]
        assert (caches[0] is None) is (caches[1] is None)
        opened += isinstance(caches[1], dict)
        assert keys({**found, "children": []}) == keys({**expected, "children": []})
    assert opened


@pytest.mark.usefixtures("_own_print_options")
def test_layers_are_pruned_as_transformers_does(tmp_path):
    theirs, ours = both(
        lambda: tiny_llama(num_hidden_layers=5), {"input_ids": random_ids(1, 3), "use_cache": False}, tmp_path
    )

    expected, found = (written(folder, "LlamaForCausalLM") for folder in (theirs, ours))
    assert found == expected
    blocks = [node["module_path"] for node in nodes(found) if node["module_path"].split(".")[-1].isdigit()]
    assert blocks == ["LlamaForCausalLM.model.layers.0", "LlamaForCausalLM.model.layers.4"]


@pytest.mark.usefixtures("_own_print_options")
def test_files_of_values_are_named_as_transformers_does_and_none_is_left_over(tmp_path):
    arguments = {"input_ids": random_ids(1, 3), "use_cache": False}
    theirs, ours = both(lambda: tiny_llama(num_hidden_layers=5), arguments, tmp_path, use_repr=False)

    def shown(folder):
        found = []

        def look(value):
            if isinstance(value, dict):
                found.extend([value["value"]] if isinstance(value.get("value"), str) else [])
                value = list(value.values())
            for item in value if isinstance(value, list) else ():
                look(item)

        look(written(folder, "LlamaForCausalLM"))
        return found

    assert sorted(shown(ours)) == sorted(shown(theirs))
    assert {f"./{path.name}" for path in ours.glob("*.safetensors")} == set(shown(ours))
    for name in shown(ours):
        assert torch.equal(load_file(ours / name)["data"], load_file(theirs / name)["data"])


def test_the_trace_is_beside_the_files_and_has_what_modules_with_children_return(tmp_path):
    model = Stack(4)
    with model_addition_debugger_context(model, tmp_path) as found:
        assert found is model
        result = model(torch.ones(3, 4))

    assert not result.requires_grad
    trace = Trace.load(tmp_path / "Stack_debug_trace")
    assert trace.complete
    assert torch.equal(trace.tensor(trace.calls[0].outputs[0]), result)
    assert [call.path for call in trace.calls if call.class_name == "Block"] == [f"blocks.{i}" for i in range(4)]


def test_a_module_that_is_called_several_times_keeps_all_its_files(tmp_path):
    class Thrice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(self.layer(self.layer(x)))

    model = Thrice()
    x = torch.ones(1, 2)
    with model_addition_debugger_context(model, tmp_path, use_repr=False):
        result = model(x)

    children = written(tmp_path, "Thrice")["children"]
    names = [child["outputs"]["value"] for child in children]
    assert len(set(names)) == 3
    assert names[0] == "./Thrice.layer_outputs.safetensors"
    assert torch.equal(load_file(tmp_path / names[-1])["data"], result)


def test_names_that_would_be_the_same_file_or_none(tmp_path):
    class Takes(nn.Module):
        def forward(self, **kwargs):
            return kwargs["x"][0]

    tensors = [torch.full((2,), float(number)) for number in range(4)]
    with model_addition_debugger_context(model := Takes(), tmp_path, use_repr=False):
        model(x=[tensors[0]], x_0=tensors[1], **{"a/b": tensors[2], "../c": tensors[3]})

    kwargs = written(tmp_path, "Takes")["inputs"]["kwargs"]
    values = [kwargs["x"][0], kwargs["x_0"], kwargs["a/b"], kwargs["../c"]]
    assert [load_file(tmp_path / value["value"])["data"][0].item() for value in values] == [0, 1, 2, 3]
    assert {path.parent for path in tmp_path.rglob("*.safetensors")} == {tmp_path, tmp_path / "Takes_debug_trace"}


def test_an_exception_leaves_the_files_and_nothing_else(tmp_path):
    model = Fails()
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(ValueError, match="no such thing"), model_addition_debugger_context(model, tmp_path):
        model(torch.ones(2, 4))

    tree = written(tmp_path, "Fails")
    assert tree["error"] == "ValueError: no such thing"
    assert [child["module_path"] for child in tree["children"]] == ["Fails.good", "Fails.bad"]
    assert [dict(vars(module)) for module in model.modules()] == before


def test_print_options_and_output_are_left_alone(tmp_path, capsys):
    model = Block()
    x = torch.tensor([[1.5, 1000.25, 0.001, 2.0]])
    before, options = repr(x), dict(vars(torch._tensor_str.PRINT_OPTS))
    with model_addition_debugger_context(model, tmp_path):
        model(x)
        assert repr(x) == before

    assert vars(torch._tensor_str.PRINT_OPTS) == options
    assert capsys.readouterr().out == ""


def test_every_call_of_a_generation_is_in_the_tree(tmp_path):
    model = tiny_llama()
    with model_addition_debugger_context(model, tmp_path):
        model.generate(random_ids(1, 3), max_new_tokens=3, do_sample=False)

    tree = written(tmp_path, "LlamaForCausalLM")
    assert [child["module_path"] for child in tree["children"]] == ["LlamaForCausalLM"] * 3
    shapes = [child["inputs"]["kwargs"]["input_ids"]["shape"] for child in tree["children"]]
    assert shapes == ["torch.Size([1, 3])", "torch.Size([1, 1])", "torch.Size([1, 1])"]


def test_dataclasses_are_opened(tmp_path):
    model = Passes()
    with model_addition_debugger_context(model, tmp_path):
        model(Pair(torch.ones(2), torch.zeros(1)))

    described = written(tmp_path, "Passes", "SUMMARY")["outputs"]
    assert described["left"] == {
        "shape": "torch.Size([2])",
        "dtype": "torch.float32",
        "mean": "tensor(1.0000e+00)",
        "std": "tensor(0.)",
        "min": "tensor(1.0000e+00)",
        "max": "tensor(1.0000e+00)",
    }
    assert described["name"] == "pair"


def test_blocks_inside_of_each_other_write_the_same(tmp_path):
    model = Block()
    with model_addition_debugger_context(model, tmp_path / "a"), model_addition_debugger_context(model, tmp_path / "b"):
        model(torch.ones(1, 4))
    assert written(tmp_path / "a", "Block") == written(tmp_path / "b", "Block")


def test_two_threads_inside_of_one_block_and_with_a_block_each(tmp_path):
    model, output = Block(), sys.stdout
    barrier = threading.Barrier(2)

    def shared():
        barrier.wait()
        model(torch.ones(1, 4))

    def own(name):
        with model_addition_debugger_context(model, tmp_path / name):
            shared()

    with model_addition_debugger_context(model, tmp_path / "shared"):
        in_threads(shared, shared)
    in_threads(lambda: own("a"), lambda: own("b"))

    assert sys.stdout is output
    assert not output.closed
    assert len(written(tmp_path / "shared", "Block")["children"]) == 2
    assert written(tmp_path / "a", "Block") == written(tmp_path / "b", "Block")


def test_only_modules_and_only_directories(tmp_path):
    with pytest.raises(InvalidTypeError, match="Only modules"), model_addition_debugger_context(len):
        raise AssertionError
    (tmp_path / "file").write_text("")
    with pytest.raises(DestinationError), model_addition_debugger_context(Block(), tmp_path / "file"):
        raise AssertionError
