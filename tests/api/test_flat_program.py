"""Programs that travel: torch alone reads them, and they return what the model returns at unseen sizes."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import exportkit
from exportkit.errors import DestinationError
from tests.models import tiny_llama

READS = """
import json, sys
sys.modules["exportkit"] = sys.modules["transformers"] = None  # importing them raises
import torch
about = {"exportkit.json": ""}
program = torch.export.load(sys.argv[1], extra_files=about).module()
for file in sys.argv[2:]:
    given, expected = torch.load(file)
    returned = program(*given)
    assert type(returned) is tuple
    for tensor, wanted in zip(returned, expected, strict=True):
        torch.testing.assert_close(tensor, wanted, atol=1e-5, rtol=1e-4)
print(about["exportkit.json"])
"""


def read_elsewhere(program, folder, cases):
    """Runs a program on cases in a process without exportkit and transformers, and returns its description."""
    files = [folder / f"case_{number}.pt" for number in range(len(cases))]
    for file, case in zip(files, cases, strict=True):
        torch.save(case, file)
    result = subprocess.run(
        [sys.executable, "-c", READS, program, *files], capture_output=True, text=True, check=False, cwd=folder
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_a_model_with_a_cache(tmp_path):
    model, observer = tiny_llama(), exportkit.InputObserver()
    with observer(model):
        model.generate(torch.arange(3, 10)[None], max_new_tokens=3, do_sample=False, pad_token_id=0)
    exported = exportkit.export(model, observer)
    path = exported.save_program(tmp_path / "llama.pt2")
    assert path == tmp_path / "llama.pt2"

    def leaves(cache):
        layers = enumerate(cache.layers)
        return {
            f"past_key_values.layers[{n}].{k}": getattr(layer, k) for n, layer in layers for k in ("keys", "values")
        }

    def case(batch, new, past):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            if past:
                model(torch.randint(3, 60, (batch, past)), past_key_values=cache)
            given = {
                "input_ids": torch.randint(3, 60, (batch, new)),
                "attention_mask": torch.ones(batch, past + new, dtype=torch.int64),
                "position_ids": torch.arange(past, past + new).repeat(batch, 1),
            }
            for number, layer in enumerate(cache.layers):
                given |= {
                    f"past_key_values.layers[{number}].{name}": getattr(layer, name) for name in ("keys", "values")
                }
            tensors = [given[name].clone() for name in exported.inputs]
            result = model(**{n: v for n, v in given.items() if "layers" not in n}, past_key_values=cache)
        logits = result.logits if new == 1 else result.logits[:, -1:]
        made = {"logits": logits} | leaves(result.past_key_values)
        return tensors, [made[name] for name in exported.outputs]

    description = read_elsewhere(path, tmp_path, [case(3, 5, 9), case(1, 1, 4), case(2, 4, 11)])
    assert [item["path"] for item in description["inputs"]] == list(exported.inputs)
    assert [item["path"] for item in description["outputs"]] == list(exported.outputs)
    assert description["inputs"][1]["axes"] == ["batch", "past_sequence + sequence"]
    assert description["limits"] == exported.domain.limits()


def test_python_values_among_inputs_and_outputs(tmp_path):
    class Model(nn.Module):
        def forward(self, data, scale=1.0, extra=None):
            return {"sum": data["x"] + data["y"] * scale, "rows": data["x"].shape[0], "extra": extra, "x": data["x"]}

    model, observer = Model(), exportkit.InputObserver()
    with observer(model):
        for rows in (2, 3):
            model({"x": torch.ones(rows, 4), "y": torch.ones(rows, 4)}, scale=2.0)
    exported = exportkit.export(model, observer)
    path = exported.save_program(tmp_path / "model.pt2")
    assert (exported.inputs, exported.outputs) == (("data.x", "data.y"), ("sum", "x"))
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    description = read_elsewhere(path, tmp_path, [([x, y], [x + y * 2.0, x])])
    assert description["constants"] == {"scale": "2.0"}


@pytest.fixture(scope="module")
def convolution(tmp_path_factory):
    """The file of a program, and inputs at sizes that it was not traced with, with what the model returns for them."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2))
    observer = exportkit.InputObserver()
    with observer(model):
        for shape in ((2, 3, 8, 10), (3, 3, 12, 6)):
            model(torch.randn(shape))
    path = exportkit.export(model, observer).save_program(tmp_path_factory.mktemp("program") / "model.pt2")
    cases = [torch.randn(shape) for shape in ((5, 3, 16, 4), (4, 3, 6, 20))]
    return path, [(case, model(case).detach()) for case in cases]


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles C++")
def test_aotinductor_compiles_it(convolution, tmp_path):
    path, cases = convolution
    package = str(tmp_path / "compiled.pt2")
    compiled = torch._inductor.aoti_load_package(
        torch._inductor.aoti_compile_and_package(torch.export.load(path), package_path=package)
    )
    for given, expected in cases:
        (returned,) = compiled(given)
        torch.testing.assert_close(returned, expected, atol=1e-5, rtol=1e-4)


def test_openvino_converts_it(convolution):
    import openvino

    path, cases = convolution
    converted = openvino.convert_model(torch.export.load(path))
    compiled = openvino.compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for given, expected in cases:
        returned = torch.from_numpy(compiled([given.numpy()])[0])
        torch.testing.assert_close(returned, expected, atol=1e-5, rtol=1e-4)


def test_torch_refuses_sizes_beyond_an_upper_limit(tmp_path):
    model, observer = nn.Linear(3, 2), exportkit.InputObserver()
    with observer(model):
        for rows in (4, 5):
            model(torch.ones(rows, 3))
    exported = exportkit.export(model, observer.plan().range("batch", 2, 16))
    program = torch.export.load(exported.save_program(tmp_path / "model.pt2")).module()
    assert program(torch.ones(16, 3))[0].shape == (16, 2)
    with pytest.raises(AssertionError, match=r"size.*<= 16"):
        program(torch.ones(17, 3))


def test_each_module_of_a_pipeline_has_a_program(tmp_path):
    modules, observer = {"up": nn.Linear(2, 3), "down": nn.Linear(3, 2)}, exportkit.InputObserver()
    with observer(modules):
        modules["down"](modules["up"](torch.ones(4, 2)))
    exported = exportkit.export(modules, observer)
    assert exported.save_program(tmp_path / "all.pt2") == tmp_path
    assert sorted(file.name for file in tmp_path.iterdir()) == ["all.down.pt2", "all.up.pt2"]
    x = torch.randn(5, 3)
    read_elsewhere(tmp_path / "all.down.pt2", tmp_path, [([x], [modules["down"](x).detach()])])


def test_a_path_that_cannot_be_written(tmp_path):
    model, observer = nn.Linear(2, 3), exportkit.InputObserver()
    with observer(model):
        model(torch.ones(4, 2))
    (tmp_path / "file").write_text("")
    with pytest.raises(DestinationError):
        exportkit.export(model, observer).save_program(tmp_path / "file" / "model.pt2")
