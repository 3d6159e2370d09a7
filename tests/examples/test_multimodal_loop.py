"""Multimodal models in parts: from pixels and a prompt, they generate the same greedy tokens as ``generate``."""

import pytest
import torch

import exportkit
from tests.arguments.generative import TEXT, qwen2_5_vl

IMAGE = 98
COUNT = 10
GRID = [1, 4, 4]


def llava():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=16
    )
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**TEXT), image_token_id=IMAGE)
    return LlavaForConditionalGeneration(config)


def gemma3():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

    vision = SiglipVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8,
        vision_use_head=False,
    )  # fmt: skip
    layers = ["sliding_attention", "full_attention"]
    text = Gemma3TextConfig(**TEXT, head_dim=8, sliding_window=12, layer_types=layers)
    tokens = {"image_token_id": IMAGE, "boi_token_index": 96, "eoi_token_index": 97}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens)
    )


def prompt(name, batch, words):
    """Four placeholders for each image, then words, and whatever else this kind of model needs."""
    tokens = torch.randint(3, 90, (batch, words + 5), generator=torch.Generator().manual_seed(batch))
    tokens[:, 1:5] = IMAGE
    pixels = torch.Generator().manual_seed(words)
    if name == "qwen2_5_vl":
        patches = torch.randn(batch * 16, 3 * 2 * 4 * 4, generator=pixels)
        grid = torch.tensor([GRID] * batch)
        types = (tokens == IMAGE).int()
        return {"input_ids": tokens, "pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": types}
    inputs = {"input_ids": tokens, "pixel_values": torch.randn(batch, 3, 32, 32, generator=pixels)}
    return inputs | ({"token_type_ids": (tokens == IMAGE).long()} if name == "gemma3" else {})


def positions(model, inputs, start, shift):
    """Position ids of the new tokens; for m-rope one row for the text and three for images."""
    tokens = inputs["input_ids"]
    text = torch.arange(start, start + tokens.shape[1]).expand(tokens.shape)
    if "mm_token_type_ids" not in inputs:
        return text, None
    if "image_grid_thw" in inputs:
        kinds = {name: inputs[name] for name in ("mm_token_type_ids", "image_grid_thw")}
        rope, shift = model.model.get_rope_index(tokens, attention_mask=torch.ones_like(tokens), **kinds)
        return torch.cat([text[None], rope]), shift
    return torch.cat([text[None], (text + shift)[None].expand(3, -1, -1)]), shift


def greedy(onnx_model, model, inputs):
    """The loop: first pixels and prompt, then each new token with the cache."""
    found, start, shift = [], 0, None
    while len(found) < COUNT:
        position_ids, shift = positions(model, inputs, start, shift)
        outputs = onnx_model(**inputs, position_ids=position_ids, logits_to_keep=1)
        start += inputs["input_ids"].shape[1]
        found.append(outputs.logits[:, -1].argmax(-1, keepdim=True))
        more = {"mm_token_type_ids": torch.zeros_like(found[-1]).int()} if "mm_token_type_ids" in inputs else {}
        inputs = {"input_ids": found[-1], "past_key_values": outputs.past_key_values, **more}
    return torch.cat(found, dim=1)


@pytest.mark.runtime
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_assembled_parts_generate_the_same_tokens(name, tmp_path):
    torch.manual_seed(0)
    model = {"llava": llava, "qwen2_5_vl": lambda: qwen2_5_vl()[0], "gemma3": gemma3}[name]().eval()
    model.generation_config.eos_token_id = None
    observer = exportkit.InputObserver()
    options = {"do_sample": False, "pad_token_id": 0}
    with observer(model, parts="auto"), torch.no_grad():
        model.generate(**prompt(name, 1, 6), max_new_tokens=3, **options)
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert list(onnx_model.parts) == ["image_features"]
    for batch in (1, 2):
        inputs = prompt(name, batch, 9)
        with torch.no_grad():
            expected = model.generate(**inputs, max_new_tokens=COUNT, **options)[:, -COUNT:]
        assert torch.equal(greedy(onnx_model, model, inputs), expected)
