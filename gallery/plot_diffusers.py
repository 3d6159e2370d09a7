"""
A Stable Diffusion pipeline on ONNX
===================================

A pipeline of diffusers runs a text encoder, a UNet many times, and the decoder of a VAE. Does it make the same images
with graphs in their place?
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

import exportkit

# %%
# A tiny pipeline with random weights stands for a real one, which ``StableDiffusionPipeline.from_pretrained`` loads.
# Its tokenizer knows single letters.

folder = TemporaryDirectory()
letters = [chr(code) for code in range(33, 127)]
tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
vocabulary, merges = Path(folder.name, "vocab.json"), Path(folder.name, "merges.txt")
vocabulary.write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
merges.write_text("#version: 0.2\n")

torch.manual_seed(0)
text = {"vocab_size": len(tokens), "bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1}
small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
pipe = StableDiffusionPipeline(
    text_encoder=CLIPTextModel(CLIPTextConfig(**text, **small)).eval(),
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


def images(prompts, size, steps, seed):
    noise = torch.Generator().manual_seed(seed)
    return pipe(prompts, height=size, width=size, num_inference_steps=steps, generator=noise, output_type="np").images


# %%
# Two images are enough: of two sizes, for one prompt and for two.

observer = exportkit.InputObserver()
with observer(pipe):
    images("a cat", size=16, steps=3, seed=0)
    images(["a dog", "a bird"], size=24, steps=2, seed=1)

out = Path(folder.name, "out")
exportkit.export(pipe, observer).save(out)
onnx_model = exportkit.load(out)
print(sorted(path.name for path in out.glob("*.onnx")), onnx_model.verify().verdict())

# %%
# Prompts, size, steps and seed are others now. The pipeline runs twice with them, and the images are compared.

print(exportkit.compare_runs(lambda: images(["a", "b", "c"], size=32, steps=4, seed=5), pipe, onnx_model))
