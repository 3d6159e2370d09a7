"""
A Stable Diffusion pipeline on ONNX
===================================

Does a diffusers pipeline make the same images if its text encoder, its UNet and its VAE decoder run as graphs?
"""

from tempfile import TemporaryDirectory

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

import exportkit

# %%
# Tiny models with random weights stand for those that ``StableDiffusionPipeline.from_pretrained`` loads. The vocabulary
# of the tokenizer is single characters.

torch.manual_seed(0)
letters = [chr(code) for code in range(33, 127)]
tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
text = CLIPTextConfig(vocab_size=len(tokens), bos_token_id=len(tokens) - 2, eos_token_id=len(tokens) - 1, **small)
crossing = {"down_block_types": ["CrossAttnDownBlock2D"], "up_block_types": ["CrossAttnUpBlock2D"]}
coding = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
widths = {"block_out_channels": (8,), "cross_attention_dim": 32, "attention_head_dim": 4, "layers_per_block": 1}
pipe = StableDiffusionPipeline(
    text_encoder=CLIPTextModel(text).eval(),
    tokenizer=CLIPTokenizer({token: n for n, token in enumerate(tokens)}, [], model_max_length=77),
    unet=UNet2DConditionModel(**crossing, **widths, norm_num_groups=4).eval(),
    vae=AutoencoderKL(**coding, block_out_channels=(4, 8), norm_num_groups=4).eval(),
    scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
    **dict.fromkeys(("safety_checker", "feature_extractor")),
    requires_safety_checker=False,
)
pipe.set_progress_bar_config(disable=True)


def images(prompts, size, steps, seed):
    noise = torch.Generator().manual_seed(seed)
    return pipe(prompts, size, size, num_inference_steps=steps, generator=noise, output_type="np").images


# %%
# Two runs are enough: at two image sizes, with one prompt and with two.

observer, folder = exportkit.InputObserver(), TemporaryDirectory()
with observer(pipe):
    images("a cat", size=16, steps=3, seed=0)
    images(["a dog", "a bird"], size=24, steps=2, seed=1)
exportkit.export(pipe, observer).save(folder.name)
onnx_model = exportkit.load(folder.name)
print(list(onnx_model.parts), onnx_model.verify().verdict())

# %%
# Now with different prompts, size, steps and seed: the pipeline runs twice, and the images are compared.

print(exportkit.compare_runs(lambda: images(["a", "b", "c"], size=32, steps=4, seed=5), pipe, onnx_model))
