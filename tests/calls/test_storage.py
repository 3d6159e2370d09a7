"""An observation goes to disk and comes back; whatever is wrong with the files is said, and nothing of it is run."""

import enum
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from safetensors.torch import load_file, save_file

import exportkit
from exportkit import Call, InputObserver, Observation
from exportkit.calls import storage
from exportkit.calls.observation import Failure
from exportkit.calls.signature import Signature
from exportkit.errors import (
    DestinationError,
    ExportkitError,
    InvalidTypeError,
    ObservationError,
    TreeError,
    UnregisteredClassError,
)
from exportkit.files import TEMPORARY
from exportkit.trees import flatten, register_flattening_functions
from exportkit.trees.json_form import Unwritten
from tests.models import Scale, Total, random_cache, random_ids, tiny_llama
from tests.mutations import mutated
from tests.sealed import accept_tensors, change_json, write_json

DTYPES = sorted(storage.DTYPES)


class Side(enum.Enum):
    LEFT = "left"


class Holder:
    def __init__(self, tensor):
        self.tensor = tensor


def _takes(x, side=Side.LEFT, /, *args, scale=float("inf"), made_by=len, **kwargs):
    """Has a parameter of each kind."""


SIGNATURE = Signature(("x",), None, None, {}, frozenset())


def _observation(*values, outputs=None):
    """Returns an observation of a method with the one input x, which was given these values."""
    calls = [
        Call({"x": flatten(value)}, SIGNATURE, frozenset({"x"}), flatten(outputs), index, 0.5)
        for index, value in enumerate(values)
    ]
    return Observation(SIGNATURE, tuple(calls))


def _given(observation, index=0):
    return observation.calls[index].arguments["x"].build()


def _saved(tmp_path, *values, **options):
    directory = tmp_path / "observed"
    _observation(*values).save(directory, **options)
    return directory


def _changed(directory, change):
    change_json(directory / "observation.json", change)


def _assert_same_trees(expected, got):
    assert got.paths == expected.paths
    assert got.growing == expected.growing
    assert got.constants() == expected.constants()
    for path, tensor in expected.tensors().items():
        assert got.tensors()[path].dtype == tensor.dtype
        assert torch.equal(got.tensors()[path], tensor), path


def test_everything_that_was_observed_comes_back(tmp_path):
    model, observer = tiny_llama(), InputObserver()
    with observer(model, store_n_calls=2):
        model.generate(random_ids(2, 3), max_new_tokens=2, do_sample=False)
    observation = replace(
        observer.observation,
        failures=(Failure("ValueError: no", "dict()"),),
        problems=("TypeError: what",),
        removed=frozenset({"labels"}),
        restored=frozenset({"attention_mask", "position_ids"}),
    )
    observation.save(tmp_path)
    loaded = Observation.load(tmp_path)

    assert replace(loaded, calls=()) == replace(observation, calls=())
    assert loaded.has_values
    assert loaded.seen == observation.seen
    for call, again in zip(observation.calls, loaded.calls, strict=True):
        assert list(again.arguments) == list(call.arguments)
        assert (again.index, again.named, again.latency) == (call.index, call.named, call.latency)
        assert type(again.outputs.build()) is type(call.outputs.build())
        _assert_same_trees(call.outputs, again.outputs)
        for name, tree in call.arguments.items():
            _assert_same_trees(tree, again.arguments[name])


def test_shapes_of_calls_that_were_not_stored_come_back(tmp_path):
    model, observer = Total(), InputObserver()
    with observer(model, store_n_calls=1):
        for rows in (2, 3, 3):
            model(torch.ones(rows, 4))
    observer.observation.save(tmp_path)
    loaded = Observation.load(tmp_path)

    assert len(loaded.calls) == 1
    assert loaded.seen == observer.observation.seen
    assert [(one.inputs, one.count) for one in loaded.seen] == [({"x": (2, 4)}, 1), ({"x": (3, 4)}, 2)]


def test_signature_of_any_kind_comes_back(tmp_path):
    signature = Signature.of(_takes)
    Observation(signature, ()).save(tmp_path)
    loaded = Observation.load(tmp_path).signature

    assert loaded.defaults["made_by"] == Unwritten("builtins.builtin_function_or_method", "<built-in function len>")
    assert replace(loaded, defaults={**loaded.defaults, "made_by": len}) == signature


def test_positional_and_extra_arguments_come_back(tmp_path):
    model, observer = Total(), InputObserver()
    with observer(model):
        model(torch.ones(2), torch.ones(1), other=torch.zeros(1))
    observer.observation.save(tmp_path)
    loaded = Observation.load(tmp_path)

    args, kwargs = loaded.signature.unbind(loaded.calls[0].values(), loaded.calls[0].named)
    assert [arg.tolist() for arg in args] == [[1, 1], [1]]
    assert kwargs["other"].tolist() == [0]


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3)])
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensor_of_every_type_comes_back(tmp_path, name, shape):
    dtype = getattr(torch, name)
    highest = 2 if dtype is torch.bool else 100
    generated = torch.randint(highest, (*shape, 16), dtype=torch.uint8)  # as bytes, so that every type has values
    tensor = generated[..., : dtype.itemsize].contiguous().view(dtype).reshape(shape)
    got = _given(Observation.load(_saved(tmp_path, tensor)))

    assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
    assert got.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).reshape(3, 4).T,
        torch.arange(3).expand(2, 3),
        torch.arange(10)[2:8:2],
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor([1 + 2j, 3j]).conj().imag,
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["transposed", "expanded", "strided", "conjugated", "negated", "parameter"],
)
def test_values_are_written_however_they_lie_in_memory(tmp_path, tensor):
    got = _given(Observation.load(_saved(tmp_path, tensor)))

    assert torch.equal(got, tensor)
    assert got.is_contiguous()
    assert not got.requires_grad


def test_tensors_that_share_memory_come_back(tmp_path):
    tensor = torch.arange(6)
    parts = [tensor, tensor[:3], tensor.view(2, 3), torch.ones(0), torch.ones(0)]
    got = _given(Observation.load(_saved(tmp_path, parts)))

    assert all(torch.equal(a, b) for a, b in zip(got, parts, strict=True))


def test_tensor_that_calls_share_is_written_once_and_shared_again(tmp_path):
    tensor = torch.arange(6)
    directory = _saved(tmp_path, tensor, {"again": tensor})
    loaded = Observation.load(directory)

    assert list(load_file(directory / "tensors.safetensors")) == ["calls[0].arguments.x"]
    assert _given(loaded, 0) is _given(loaded, 1)["again"]


def test_keys_of_the_tensors_can_be_read(tmp_path):
    _observation(random_cache(2, layers=1), outputs={"logits": torch.ones(1)}).save(tmp_path)

    assert sorted(load_file(tmp_path / "tensors.safetensors")) == [
        "calls[0].arguments.x.layers[0].keys",
        "calls[0].arguments.x.layers[0].values",
        "calls[0].outputs.logits",
    ]


def test_calls_of_two_observations_put_together_are_kept_apart(tmp_path):
    first, second = _observation(torch.zeros(1)), _observation(torch.ones(1))
    replace(first, calls=first.calls + second.calls).save(tmp_path)
    loaded = Observation.load(tmp_path)

    assert [call.index for call in loaded.calls] == [0, 0]
    assert [_given(loaded, index).item() for index in (0, 1)] == [0, 1]


def test_tensor_without_values_comes_back_without(tmp_path):
    got = _given(Observation.load(_saved(tmp_path, torch.empty(2, 3, device="meta"))))

    assert got.is_meta
    assert got.shape == (2, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.cuda
def test_tensor_of_another_device_comes_back_on_the_cpu(tmp_path):
    got = _given(Observation.load(_saved(tmp_path, torch.ones(2, device="cuda"))))

    assert got.device.type == "cpu"


def test_constant_that_json_does_not_hold_comes_back_as_a_placeholder(tmp_path):
    loaded = Observation.load(_saved(tmp_path, [torch.ones(2), {3}]))

    assert _given(loaded)[1] == Unwritten("builtins.set", "{3}")
    assert loaded.calls[0].constants() == {"x[1]": Unwritten("builtins.set", "{3}")}


def test_files_are_readable_for_all_who_may_read_the_directory(tmp_path):
    directory = _saved(tmp_path, torch.ones(1))

    assert len({file.stat().st_mode for file in directory.iterdir()}) == 1


def test_observation_says_what_wrote_it(tmp_path):
    data = json.loads((_saved(tmp_path, torch.ones(1)) / "observation.json").read_text())

    assert (data["format"], data["version"]) == ("exportkit-observation", 4)
    assert data["written_by"]["torch"] == torch.__version__
    assert set(data["written_by"]) == {"python", "exportkit", "torch", "transformers", "safetensors"}


# Shapes only


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_values_that_were_not_written_are_made_up(tmp_path, name):
    dtype = getattr(torch, name)
    directory = _saved(tmp_path, torch.zeros(4, 5).to(dtype), torch.zeros(4, 5).to(dtype), values=False)
    loaded, again = Observation.load(directory), Observation.load(directory)
    values = _given(loaded)

    assert not loaded.has_values
    assert sorted(file.name for file in directory.iterdir()) == ["observation.json"]
    assert (values.dtype, values.shape) == (dtype, (4, 5))
    numbers = torch.view_as_real(values.to(torch.complex64)) if dtype.is_complex else values.to(torch.float64)
    assert torch.equal(numbers, _as_numbers(_given(again)))
    if dtype.is_floating_point or dtype.is_complex:
        assert numbers.min() >= 0.09
        assert numbers.max() <= 1
        assert not torch.equal(numbers, _as_numbers(_given(loaded, 1)))
    else:
        assert numbers.eq(1).all()


def _as_numbers(tensor):
    return torch.view_as_real(tensor.to(torch.complex64)) if tensor.is_complex() else tensor.to(torch.float64)


def test_made_up_values_are_not_written_as_if_they_had_been_seen(tmp_path):
    Observation.load(_saved(tmp_path, torch.zeros(3), values=False)).save(tmp_path / "again")

    assert not Observation.load(tmp_path / "again").has_values


def test_sizes_alone_give_the_same_plan(tmp_path):
    from exportkit.probing.planning import plan_calls

    model, observer = tiny_llama(), InputObserver()
    with observer(model, store_n_calls=3):
        model.generate(random_ids(2, 3), max_new_tokens=3, do_sample=False)
    observer.observation.save(tmp_path, values=False)

    assert str(plan_calls(Observation.load(tmp_path))) == str(plan_calls(observer.observation))


# Directories


def test_directory_is_made(tmp_path):
    _observation(torch.ones(1)).save(str(tmp_path / "a" / "b"))

    assert sorted(file.name for file in (tmp_path / "a" / "b").iterdir()) == ["observation.json", "tensors.safetensors"]


def test_observation_is_written_over_another(tmp_path):
    _saved(tmp_path, torch.ones(1))
    directory = _saved(tmp_path, torch.zeros(2))
    assert _given(Observation.load(directory)).tolist() == [0, 0]

    _saved(tmp_path, torch.zeros(3), values=False)
    assert sorted(file.name for file in directory.iterdir()) == ["observation.json"]

    _saved(tmp_path, torch.zeros(4))
    assert Observation.load(directory).has_values


def test_damaged_observation_and_leftovers_of_a_save_can_be_written_over(tmp_path):
    directory = _saved(tmp_path, torch.ones(1))
    file = directory / "observation.json"
    file.write_text(file.read_text()[:200])
    (directory / f"{TEMPORARY}left").mkdir()
    _saved(tmp_path, torch.ones(1))

    assert len(Observation.load(directory).calls) == 1


@pytest.mark.parametrize("name", ["notes.txt", "observation.json", "tensors.safetensors"])
def test_other_files_are_left_alone(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(DestinationError) as raised:
        _observation(torch.ones(1)).save(tmp_path)
    assert str(raised.value) == (
        "An observation cannot be written over other files.\n"
        f"  where: {tmp_path}\n"
        "  expected: a new or empty directory, or one that holds an observation\n"
        f"  got: {name}\n"
        "  hint: choose a different directory, or empty this one."
    )
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("below", ["", "below"])
def test_file_in_the_place_of_a_directory_is_named(tmp_path, below):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(DestinationError, match="An observation cannot be written here") as raised:
        _observation(torch.ones(1)).save(file / below)
    assert f"where: {file / below}" in str(raised.value)
    assert "Not a directory" in str(raised.value)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="everything can be written by root")
def test_directory_that_cannot_be_written_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(DestinationError, match="Permission denied"):
        _observation(torch.ones(1)).save(tmp_path / "observed")


@pytest.mark.parametrize("failing", [0, 1])
def test_save_that_breaks_off_leaves_the_old_files_or_nothing_that_loads(tmp_path, monkeypatch, failing):
    directory = _saved(tmp_path, torch.ones(1))
    done = []

    def replace_some(source, target):
        if len(done) == failing:
            raise OSError("No space left on device")
        done.append(target)
        shutil.move(source, target)

    monkeypatch.setattr(os, "replace", replace_some)
    with pytest.raises(DestinationError, match="got: No space left on device"):
        _saved(tmp_path, torch.zeros(2))
    assert sorted(file.name for file in directory.iterdir()) == ["observation.json", "tensors.safetensors"]
    if failing == 0:
        assert _given(Observation.load(directory)).tolist() == [1]
        return
    with pytest.raises(ObservationError) as raised:
        Observation.load(directory)
    text = str(raised.value)
    assert text.startswith(f"The two files of an observation were not saved together.\n  where: {directory}")
    assert "expected: stamp " in text
    assert text.endswith("hint: the last save was interrupted: save again.")


# What cannot be written


def test_tensor_that_is_not_dense_is_refused(tmp_path):
    with pytest.raises(ObservationError) as raised:
        _saved(tmp_path, {"mask": torch.eye(2).to_sparse()})
    assert str(raised.value) == (
        "A tensor of this kind cannot be written.\n"
        "  where: calls[0].arguments.x.mask\n"
        "  expected: a dense tensor of booleans, or of whole, real or complex numbers\n"
        "  got: torch.float32, torch.sparse_coo\n"
        "  hint: leave the input out: observer.remove_inputs([...])."
    )
    assert list(tmp_path.iterdir()) == []


def test_object_that_holds_tensors_out_of_reach_is_refused(tmp_path):
    holder = Holder(torch.ones(1))
    holder.lock = threading.Lock()
    with pytest.raises(UnregisteredClassError, match=r"Holder holds tensors(.|\n)*where: x\[0\](.|\n)*lock is a lock"):
        _saved(tmp_path, [holder])


def test_container_that_cannot_be_written_is_refused_and_located(tmp_path):
    with pytest.raises(TreeError) as raised:
        _saved(tmp_path, torch.ones(1), {frozenset({3}): torch.ones(1)})
    assert str(raised.value).startswith("calls[1].arguments.x: A key of a dict cannot be written as JSON.\n  expected:")


def test_number_that_json_does_not_hold_is_refused(tmp_path):
    observation = _observation(torch.ones(1))
    strange = replace(observation, calls=(replace(observation.calls[0], latency=float("nan")),))
    with pytest.raises(ObservationError, match="This observation contains a value that JSON cannot represent"):
        strange.save(tmp_path / "observed")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_any_number_in_a_cache_comes_back(tmp_path, number):
    cache = random_cache(2)
    cache.layers[0].temperature = number
    again = _given(Observation.load(_saved(tmp_path, cache)))
    assert repr(again.layers[0].temperature) == repr(number)


# What cannot be read


def test_missing_directory_is_named(tmp_path):
    with pytest.raises(DestinationError) as raised:
        Observation.load(tmp_path / "nowhere")
    assert str(raised.value) == (
        "No observation can be read here.\n"
        f"  where: {tmp_path / 'nowhere'}\n"
        "  expected: a directory with observation.json, as observation.save(directory) writes it\n"
        f"  got: [Errno 2] No such file or directory: '{tmp_path / 'nowhere' / 'observation.json'}'"
    )


@pytest.mark.parametrize("content", [b"", b'{"format": "exportkit-observation", "vers', b"\xff\xfe", b"[" * 100_000])
def test_json_that_was_cut_short_is_named(tmp_path, content):
    file = tmp_path / "observation.json"
    file.write_bytes(content)
    with pytest.raises(ObservationError) as raised:
        Observation.load(tmp_path)
    text = str(raised.value)
    assert text.startswith(f"This observation is damaged.\n  where: {file}\n  got: ")
    assert text.endswith("\n  hint: the file was changed or truncated: observe and save again.")


@pytest.mark.parametrize(
    ("data", "got"),
    [
        ({"format": "exportkit-observation", "version": 1}, "exportkit-observation 1"),
        ({"format": "exportkit-plan", "version": 1}, "exportkit-plan 1"),
        ([], "None None"),
    ],
)
def test_another_version_is_named(tmp_path, data, got):
    (tmp_path / "observation.json").write_text(json.dumps(data))
    with pytest.raises(ObservationError) as raised:
        Observation.load(tmp_path)
    assert str(raised.value) == (
        "This version cannot read an observation of this format.\n"
        f"  where: {tmp_path / 'observation.json'}\n"
        "  expected: exportkit-observation 4\n"
        f"  got: {got}"
    )


def test_another_version_says_what_wrote_it(tmp_path):
    directory = _saved(tmp_path, torch.ones(1))
    _changed(directory, lambda data: data.update(version=9, written_by={"exportkit": "9.1", "torch": "9.2"}))
    with pytest.raises(ObservationError, match=r"hint: it was written by exportkit 9\.1, torch 9\.2\."):
        Observation.load(directory)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda data: data.pop("calls"), "KeyError: 'calls'"),
        (lambda data: data["signature"].pop("names"), "InvalidDataError: expected a value for names, got none"),
        (lambda data: data["calls"][0].update(arguments=3), "InvalidDataError: [0].arguments: expected a dict, got 3"),
        (
            lambda data: data["failures"].append({"reason": "?"}),
            "InvalidDataError: [0]: expected the names error, arguments, got reason",
        ),
        (
            lambda data: _leaf(data).update(dtype="number"),
            "InvalidDataError: calls[0].arguments.x: expected a dtype that can be written, got number",
        ),
        (
            lambda data: _leaf(data).update(shape="2x3"),
            "InvalidDataError: [0].arguments.x.leaves[0].shape: expected a list, got 2x3",
        ),
        (lambda data: data["calls"].append(None), "InvalidDataError: [1]: expected a dict, got None"),
    ],
)
def test_damaged_json_is_named(tmp_path, change, got):
    directory = _saved(tmp_path, torch.ones(2))
    _changed(directory, change)
    with pytest.raises(ObservationError, match=r"This observation is damaged\.") as raised:
        Observation.load(directory)
    assert f"where: {directory / 'observation.json'}\n  got: {got}" in str(raised.value)


def _leaf(data):
    return data["calls"][0]["arguments"]["x"]["leaves"][0]


def test_damaged_layout_is_located(tmp_path):
    directory = _saved(tmp_path, torch.ones(2))
    _changed(directory, lambda data: data["calls"][0]["arguments"]["x"].update(layout={"python": "print()"}))
    with pytest.raises(TreeError, match=r"^calls\[0\]\.arguments\.x: The layout of a value is damaged\."):
        Observation.load(directory)


def test_missing_values_are_named(tmp_path):
    directory = _saved(tmp_path, torch.ones(1))
    (directory / "tensors.safetensors").unlink()
    with pytest.raises(DestinationError) as raised:
        Observation.load(directory)
    text = str(raised.value)
    assert text.startswith(
        "The values of an observation are missing.\n"
        f"  where: {directory / 'tensors.safetensors'}\n"
        "  expected: the file that was written with observation.json\n"
        "  got: No such file or directory"
    )
    assert text.endswith("  hint: copy the whole directory, or save with values=False.")


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_values_that_were_cut_short_are_named(tmp_path, length):
    directory = _saved(tmp_path, torch.ones(9))
    file = directory / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ObservationError, match=r"This observation is damaged\.") as raised:
        Observation.load(directory)
    assert f"where: {file}\n  got: " in str(raised.value)


def _rewritten(directory, tensors):
    """Replaces the tensors of a save, and keeps its stamp and a digest that fits."""
    stamp = json.loads((directory / "observation.json").read_text())["stamp"]
    save_file(tensors, directory / "tensors.safetensors", metadata={"stamp": stamp})
    accept_tensors(directory)


def test_value_that_is_missing_is_named(tmp_path):
    directory = _saved(tmp_path, torch.ones(2))
    _rewritten(directory, {"calls[0].arguments.y": torch.ones(2)})
    with pytest.raises(ObservationError, match=r"This observation is damaged\.") as raised:
        Observation.load(directory)
    assert "calls[0].arguments.x" in str(raised.value)


@pytest.mark.parametrize(
    ("tensor", "got"),
    [(torch.ones(3), "torch.float32 (3,)"), (torch.ones(2, dtype=torch.int64), "torch.int64 (2,)")],
)
def test_value_of_another_shape_or_type_is_named(tmp_path, tensor, got):
    directory = _saved(tmp_path, torch.ones(2))
    _rewritten(directory, {"calls[0].arguments.x": tensor})
    with pytest.raises(ObservationError) as raised:
        Observation.load(directory)
    assert str(raised.value) == (
        "A tensor does not match its description in the observation.\n"
        f"  where: calls[0].arguments.x in {directory / 'tensors.safetensors'}\n"
        "  expected: torch.float32 (2,)\n"
        f"  got: {got}\n"
        "  hint: keep observation.json and tensors.safetensors of one save together."
    )


def test_class_of_a_module_that_is_not_loaded_is_named(tmp_path):
    directory = _saved(tmp_path, torch.ones(2))
    layout = {"registered": "their.model:Inputs", "items": [{"tensor": 0}], "context": None}
    _changed(directory, lambda data: data["calls"][0]["arguments"]["x"].update(layout=layout))
    with pytest.raises(TreeError) as raised:
        Observation.load(directory)
    assert str(raised.value) == (
        "calls[0].arguments.x: Class Inputs belongs to a module that is not available.\n"
        "  where: module their.model\n"
        "  got: not imported, and reading a file does not import other modules\n"
        "  hint: import their.model first, in the version with which the file was written."
    )


def test_class_that_is_opened_in_another_way_is_named(tmp_path):
    directory = _saved(tmp_path, {"a": torch.ones(2)})
    _changed(directory, lambda data: _leaf(data).update(path="b"))
    with pytest.raises(ObservationError) as raised:
        Observation.load(directory)
    assert str(raised.value) == (
        "A value has different leaves from when it was saved.\n"
        "  where: calls[0].arguments.x\n"
        "  expected: b\n"
        "  got: a\n"
        "  hint: register its class as it was registered when the model was observed."
    )


# Elsewhere


def test_reading_and_writing_do_not_depend_on_what_is_registered(tmp_path):
    with register_flattening_functions():
        directory = _saved(tmp_path, random_cache(2))
    outside = _given(Observation.load(directory))
    with register_flattening_functions():
        inside = _given(Observation.load(directory))

    assert torch.equal(outside.layers[0].keys, inside.layers[0].keys)


def test_model_without_transformers_exports_from_a_loaded_observation(tmp_path):
    model, observer = Scale(), InputObserver()
    with observer(model):
        for rows in (2, 3):
            model(torch.randn(rows, 4), 0.5, negate=True)
    observer.observation.save(tmp_path)
    original, loaded = exportkit.export(model, observer), exportkit.export(model, Observation.load(tmp_path))

    assert str(loaded.plan) == str(original.plan)
    assert str(loaded.program.graph) == str(original.program.graph)


_ELSEWHERE = """
import sys, torch
from pathlib import Path
from exportkit import Observation, export
folder = Path(sys.argv[1])
observation = Observation.load(folder / "observed")
from safetensors.torch import load_file
from tests.models import tiny_llama
model = tiny_llama()
model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
exported = export(model, observation)
exported.to_onnx(folder / "elsewhere.onnx")
(folder / "plan.txt").write_text(str(exported.plan))
(folder / "plan.json").write_text(exported.plan.to_json())
"""


def _interface(file):
    import onnx

    graph = onnx.load(file, load_external_data=False).graph
    return [
        (
            value.name,
            value.type.tensor_type.elem_type,
            [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim],
        )
        for value in (*graph.input, *graph.output)
    ]


def test_another_process_makes_the_same_plan_and_graph(tmp_path):
    model, observer = tiny_llama(), InputObserver()
    with observer(model):
        model.generate(random_ids(2, 5), max_new_tokens=3, do_sample=False)
    observer.observation.save(tmp_path / "observed")
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    root = Path(exportkit.__file__).parents[1]
    command = [sys.executable, "-c", _ELSEWHERE, str(tmp_path)]
    with subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True) as elsewhere:
        exported = exportkit.export(model, observer)
        exported.to_onnx(tmp_path / "here.onnx")
        errors = elsewhere.communicate()[1]

    assert elsewhere.returncode == 0, errors
    assert (tmp_path / "plan.txt").read_text() == str(exported.plan)
    assert (tmp_path / "plan.json").read_text() == exported.plan.to_json()
    assert _interface(tmp_path / "elsewhere.onnx") == _interface(tmp_path / "here.onnx")


# Damaged and hostile files


@pytest.mark.parametrize("name", ["observation.json", "tensors.safetensors"])
def test_every_flipped_bit_is_found(tmp_path, name):
    directory = _saved(tmp_path, {"a": torch.arange(3), "b": 0.5}, {"a": torch.ones(2), "b": None})
    file = directory / name
    content = file.read_bytes()
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        file.write_bytes(flipped)
        with pytest.raises(ExportkitError):
            Observation.load(directory)
    file.write_bytes(content)
    Observation.load(directory)


@pytest.mark.parametrize("values", [True, False])
def test_whatever_the_json_says_there_is_no_other_error(tmp_path, values):
    given_values = {"a": [torch.ones(2, 3)], "b": 0.5, "c": random_cache(2, layers=1)}
    directory = _saved(tmp_path, given_values, {"a": [torch.ones(3, 3)], "b": None}, values=values)
    outcomes = {"loaded": 0, "refused": 0}

    @settings(max_examples=750, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(mutated(json.loads((directory / "observation.json").read_text())))
    def load(data):
        try:
            write_json(directory / "observation.json", data)
        except UnicodeEncodeError:
            return
        try:
            str(Observation.load(directory).seen)
            outcomes["loaded"] += 1
        except ExportkitError:
            outcomes["refused"] += 1

    load()
    assert outcomes["refused"] > outcomes["loaded"] > 0


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([-1, 3], r"shape\[0\]: expected an integer from 0"),
        ([10**12, 10**3], "expected less than 140737488355328 bytes"),
        ([10**12], "values are made up, as only shapes were saved, and they would take 4000000000000 bytes"),
        ([2**40, 2**40], "expected less than"),
        ([10**30], "expected an integer from 0"),
    ],
)
def test_shapes_that_no_machine_can_hold_are_refused_before_anything_is_made_up(tmp_path, shape, message):
    directory = _saved(tmp_path, torch.ones(2), values=False)
    _changed(directory, lambda data: _leaf(data).update(shape=shape))
    with pytest.raises(ObservationError, match=message):
        Observation.load(directory)


@pytest.mark.parametrize("index", [-1, True, 1, "0", 10**12])
def test_number_of_a_tensor_that_there_is_not_is_refused(tmp_path, index):
    directory = _saved(tmp_path, torch.ones(2))
    _changed(directory, lambda data: data["calls"][0]["arguments"]["x"].update(layout={"tensor": index}))
    with pytest.raises(TreeError, match="The layout of a value is damaged"):
        Observation.load(directory)


@pytest.mark.parametrize(("name", "value"), [("args", torch.ones(1)), ("kwargs", (torch.ones(1),))])
def test_variadic_arguments_that_are_none_are_refused(tmp_path, name, value):
    signature = Signature(("x", "args", "kwargs"), "args", "kwargs", {}, frozenset())
    call = Call({name: flatten(value)}, signature, frozenset(), flatten(None), 0, 0.5)
    Observation(signature, (call,)).save(tmp_path)
    with pytest.raises(ObservationError, match=rf"calls\[0\].arguments.{name}: expected a (tuple|dict)"):
        Observation.load(tmp_path)


@pytest.mark.parametrize("path", [None, 5])
def test_what_is_no_path_is_named(path):
    with pytest.raises(InvalidTypeError, match="Not a path"):
        Observation.load(path)
    with pytest.raises(InvalidTypeError, match="Not a path"):
        _observation(torch.ones(1)).save(path)
