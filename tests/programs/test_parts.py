"""Models in parts: an encoder recorded in the same run, exported beside the model, and both called as one."""

import pytest
import torch
from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration
from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig

import exportkit
from exportkit.errors import InvalidTypeError, UnknownMethodError
from tests.models import VOCABULARY, Captioner, random_ids, tiny_t5

TOKENS = torch.tensor([[1, 7, 7, 3, 4], [1, 7, 7, 5, 6]])
PIXELS = torch.linspace(-1, 1, 12).reshape(2, 2, 3)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Captioner().eval()


@pytest.fixture
def observer(model):
    observer = exportkit.InputObserver()
    with observer(model, parts="auto"), torch.no_grad():
        model.caption(TOKENS, PIXELS)
    return observer


def test_the_part_that_feeds_the_model_is_found(observer):
    (part,) = observer.parts.values()
    assert (part.name, part.module, part.observation.method_name) == ("image_features", "", "get_image_features")
    assert [(edge.source, edge.target) for edge in part.edges] == [
        ("pooled", "features.pooled"), ("raw", "features.raw")
    ]  # fmt: skip


def test_observing_parts_leaves_nothing_on_the_model(model):
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with exportkit.InputObserver()(model, parts="auto"):
        model.caption(TOKENS, PIXELS)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_nothing_is_a_part_that_does_not_feed_the_model(model):
    observer = exportkit.InputObserver()
    with observer(model, parts="auto"):
        model.get_image_features(PIXELS)
        model(TOKENS[:, :1])
    assert observer.parts == {}


def test_parts_can_be_named(model):
    observer = exportkit.InputObserver()
    with observer(model, parts=["get_image_features", "encoder"]):
        model.caption(TOKENS, PIXELS)
    assert list(observer.parts) == ["image_features"]  # the encoder ran inside of it


@pytest.mark.parametrize(
    ("parts", "error", "text"),
    [
        (["tower"], UnknownMethodError, "Captioner has no submodule or method 'tower'."),
        (["head.inner"], UnknownMethodError, "Captioner has no submodule or method 'head.inner'."),
        ("encoder", InvalidTypeError, "Parts must be given by their paths in the model."),
    ],
)
def test_unknown_parts_are_refused_before_anything_is_observed(model, parts, error, text):
    observer = exportkit.InputObserver()
    with pytest.raises(error) as raised, observer(model, parts=parts):
        pass
    assert str(raised.value).splitlines()[0] == text
    assert not set(vars(model)) & {"forward", "get_image_features"}


@pytest.mark.runtime
def test_the_parts_together_are_called_like_the_model(model, observer, tmp_path):
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert sorted(path.name for path in tmp_path.glob("*.onnx")) == ["model.image_features.onnx", "model.onnx"]
    tokens, pixels = torch.tensor([[1, 7, 7, 7], [7, 7, 7, 2], [5, 4, 3, 2]]), torch.randn(3, 2, 3)
    with torch.no_grad():
        expected = model(tokens, features=model.get_image_features(pixels))["logits"]
    assert torch.allclose(onnx_model(tokens, pixels=pixels)["logits"], expected, atol=1e-5)
    assert "features" not in {key for key, value in onnx_model(tokens).items() if value is not None}


@pytest.mark.runtime
def test_the_proof_covers_the_parts_and_both_together(model, observer, tmp_path):
    report = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok
    assert report.verdict() == "proven"
    assert [row.label for row in report.rows if row.kind == "assembled"] == ["0 from image_features 0"]
    assert report.parts["image_features"].ok
    assert str(report).startswith("image_features\nproven for batch >= 1\n\ncall ")


@pytest.mark.runtime
def test_an_encoder_decoder_model_is_called_with_the_encoders_inputs(tmp_path):
    torch.manual_seed(0)
    model, observer = tiny_t5().eval(), exportkit.InputObserver()
    ids = torch.randint(3, 60, (2, 6))
    with observer(model, parts="auto"), torch.no_grad():
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert list(onnx_model.parts) == ["encoder"]
    more = torch.randint(3, 60, (3, 9))
    start = torch.zeros(3, 1, dtype=torch.int64)
    with torch.no_grad():
        expected = model(input_ids=more, attention_mask=torch.ones_like(more), decoder_input_ids=start).logits
    got = onnx_model(input_ids=more, attention_mask=torch.ones_like(more), decoder_input_ids=start).logits
    assert torch.allclose(got, expected, atol=1e-4)


@pytest.mark.runtime
def test_caches_of_a_decoder_count_its_own_tokens(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCABULARY, "query_pre_attn_scalar": 8}
    windows = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    encoder, decoder = (T5GemmaModuleConfig(**sizes, **windows, is_decoder=flag) for flag in (False, True))
    config = T5GemmaConfig(encoder=encoder, decoder=decoder, vocab_size=VOCABULARY)
    model = T5GemmaForConditionalGeneration(config).eval()

    def run(rows, length, tokens):
        ids = random_ids(rows, length)
        changes = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        return model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **changes)

    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        run(2, 7, 6), run(3, 9, 7)
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    with onnx_model.in_place_of(model):
        cache = run(2, 8, 6).past_key_values
    assert [layer.get_seq_length() for layer in cache.self_attention_cache.layers] == [6, 6]
