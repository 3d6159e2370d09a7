"""export(weights=...): models on the meta device, whose values come from safetensors files."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import exportkit
from exportkit.calls.observation import Observation
from exportkit.errors import DestinationError, InvalidRequestError


def on_meta(make):
    with torch.device("meta"):
        return make().eval()


def llama():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=99, tie_word_embeddings=True))


def bert():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertModel(BertConfig(**sizes, vocab_size=99))


class Small(torch.nn.Module):
    """A tied weight, a persistent buffer, and one that nobody writes to a file."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.rand(4))
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, x):
        return self.second(self.first(x)) * self.scale + self.shift


def weights_of(model, folder, **changed):
    file = folder / "model.safetensors"
    save_file({**{name: t.clone() for name, t in model.state_dict().items()}, **changed}, file)
    return file


def small_observer(model):
    observer = exportkit.InputObserver()
    with observer(model):
        for batch in (2, 3):
            model(torch.rand(batch, 4))
    return observer


@pytest.mark.parametrize("make", [llama, bert])
def test_model_recorded_elsewhere_is_exported_without_weights_of_its_own(make, tmp_path):
    torch.manual_seed(0)
    model, observer = make().eval(), exportkit.InputObserver()
    ids = torch.randint(3, 99, (2, 7))
    with observer(model), torch.no_grad():
        if make is llama:
            model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        else:
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
            model(input_ids=ids[:, :5], attention_mask=torch.ones_like(ids[:, :5]))
    observer.observation.save(tmp_path / "calls")
    model.save_pretrained(tmp_path / "weights")

    hollow = on_meta(make)
    exported = exportkit.export(hollow, Observation.load(tmp_path / "calls"), weights=tmp_path / "weights")
    report = exported.save(tmp_path / "folder").verify()
    assert report.ok, str(report)
    assert all(tensor.is_meta for tensor in (*hollow.parameters(), *hollow.buffers()))
    values = dict(exported.model.named_parameters())
    assert all(torch.equal(values[name], tensor) for name, tensor in model.named_parameters())
    assert all(
        torch.equal(dict(exported.model.named_buffers())[name], tensor) for name, tensor in model.named_buffers()
    )


def test_tied_weights_stay_tied_and_values_of_the_model_are_kept(tmp_path):
    model = Small().eval()
    file = weights_of(model, tmp_path)
    hollow = on_meta(Small)
    hollow.scale = torch.full((4,), 2.0)
    exported = exportkit.export(hollow, small_observer(model), weights=file)
    assert exported.model.second.weight is exported.model.first.weight
    assert exported.model.scale is hollow.scale
    assert exported.to_onnx(tmp_path / "model.onnx").verify().ok


def test_meta_model_without_weights_is_refused():
    model = Small().eval()
    with pytest.raises(InvalidRequestError) as caught:
        exportkit.export(on_meta(Small), small_observer(model))
    assert str(caught.value).splitlines()[0] == "This model has no weights: they are on the meta device."
    assert "first.weight" in str(caught.value)
    assert "weights=" in str(caught.value)


def test_weights_for_a_model_that_has_them_are_refused(tmp_path):
    model = Small().eval()
    with pytest.raises(InvalidRequestError, match="already has weights"):
        exportkit.export(model, small_observer(model), weights=weights_of(model, tmp_path))


def test_missing_tensors_are_named_with_the_nearest(tmp_path):
    model = Small().eval()
    save_file({"first.weights": torch.rand(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequestError) as caught:
        exportkit.export(on_meta(Small), small_observer(model), weights=tmp_path)
    assert "The files lack weights of the model." in str(caught.value)
    assert "nearest to 'first.weight': first.weights" in str(caught.value)


def test_buffer_that_no_file_has_is_named(tmp_path):
    model = Small().eval()
    with pytest.raises(InvalidRequestError) as caught:
        exportkit.export(on_meta(Small), small_observer(model), weights=weights_of(model, tmp_path))
    assert "scale" in str(caught.value)
    assert "outside of the meta device" in str(caught.value)


def test_weight_of_another_shape_is_refused(tmp_path):
    model = Small().eval()
    file = weights_of(model, tmp_path, **{"first.bias": torch.rand(5)})
    with pytest.raises(InvalidRequestError) as caught:
        exportkit.export(on_meta(Small), small_observer(model), weights=file)
    assert "first.bias" in str(caught.value)
    assert "(4,)" in str(caught.value)
    assert "(5,)" in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"not a safetensors file"])
def test_files_that_cannot_be_read_are_named(content, tmp_path):
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(DestinationError, match=str(tmp_path)):
        exportkit.export(on_meta(Small), small_observer(Small()), weights=tmp_path)


class _Halved(torch.Tensor):
    """Weights that are stored as something else, as quantised ones are."""

    @staticmethod
    def __new__(cls, stored):
        return torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=torch.float32)

    def __init__(self, stored):
        self.stored = stored

    def __tensor_flatten__(self):
        return ["stored"], None

    @staticmethod
    def __tensor_unflatten__(inner, _context, _size, _stride):
        return _Halved(inner["stored"])

    @classmethod
    def __torch_dispatch__(cls, func, _types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        return func(*[arg.stored.float() if isinstance(arg, cls) else arg for arg in args], **(kwargs or {}))


def test_weights_that_hold_other_tensors_are_refused():
    model, observer = torch.nn.Linear(4, 3), exportkit.InputObserver()
    model.weight = torch.nn.Parameter(_Halved(torch.ones(3, 4, dtype=torch.float16)), requires_grad=False)
    with observer(model), torch.no_grad():
        model(torch.ones(2, 4))
    with pytest.raises(InvalidRequestError, match=r"where: weight\n  expected: plain tensors\n  got: _Halved"):
        exportkit.export(model, observer)
