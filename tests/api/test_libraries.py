"""Applications of other libraries run on graphs as they are."""

import json

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast, CLIPTextConfig, CLIPTextModel, CLIPTokenizer

import exportkit

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.fixture
def diffusion(tmp_path):
    letters = [chr(code) for code in range(33, 127)]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocabulary.write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    merges.write_text("#version: 0.2\n")
    config = CLIPTextConfig(vocab_size=len(tokens), bos_token_id=len(tokens) - 2, eos_token_id=len(tokens) - 1, **SMALL)
    torch.manual_seed(0)
    pipe = StableDiffusionPipeline(
        text_encoder=CLIPTextModel(config).eval(),
        tokenizer=CLIPTokenizer(str(vocabulary), str(merges), model_max_length=77),
        unet=UNet2DConditionModel(
            down_block_types=("CrossAttnDownBlock2D",),
            up_block_types=("CrossAttnUpBlock2D",),
            block_out_channels=(8,),
            layers_per_block=1,
            norm_num_groups=4,
            cross_attention_dim=32,
            attention_head_dim=4,
        ).eval(),
        vae=AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(4, 8),
            norm_num_groups=4,
        ).eval(),
        scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _images(pipe, prompts, size, steps, seed):
    noise = torch.Generator().manual_seed(seed)
    return pipe(prompts, height=size, width=size, num_inference_steps=steps, generator=noise, output_type="np").images


@pytest.mark.runtime
def test_a_diffusion_pipeline_makes_the_same_images(diffusion, tmp_path):
    observer = exportkit.InputObserver()
    with observer(diffusion):
        _images(diffusion, "a cat", 16, 2, 0)
        _images(diffusion, ["a dog", "a bird"], 24, 2, 1)
    exportkit.export(diffusion, observer).save(tmp_path / "out")
    onnx_model = exportkit.load(tmp_path / "out")
    assert sorted(onnx_model.parts) == ["text_encoder", "unet", "vae_decode"]
    assert onnx_model.verify().ok
    modules = [diffusion.text_encoder, diffusion.unet, diffusion.vae]
    before = [dict(vars(module)) for module in modules]
    wanted = _images(diffusion, ["x", "y", "z"], 32, 3, 5)
    with onnx_model.in_place_of(diffusion) as calls:
        found = _images(diffusion, ["x", "y", "z"], 32, 3, 5)
    assert (calls.inside, calls.outside) == (6, 0)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert [dict(vars(module)) for module in modules] == before


@pytest.mark.runtime
def test_sentences_have_the_same_embeddings(tmp_path):
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "a",
        "the",
        "cat",
        "dog",
        "bird",
        "sees",
        "hears",
        "and",
        "not",
    ]
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(words), **SMALL)).save_pretrained(tmp_path / "bert")
    BertTokenizerFast(vocab={word: number for number, word in enumerate(words)}).save_pretrained(tmp_path / "bert")
    encoder = Transformer(str(tmp_path / "bert"))
    model = SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension()), Normalize()])
    observer = exportkit.InputObserver()
    with observer(model):
        model.encode(["the cat sees a bird", "a dog"])
        model.encode(["the dog hears the cat and the bird", "not a cat", "birds"])
    assert exportkit.export(model, observer).save(tmp_path / "out").verify().ok
    texts = ["the bird hears the dog", "the cat", "a cat and a dog and a bird and the dog", "not the dog"] * 5
    wanted = model.encode(texts)
    with exportkit.load(tmp_path / "out").in_place_of(model) as calls:
        found = model.encode(texts, batch_size=8)
    assert (calls.inside, calls.outside) == (3, 0)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
