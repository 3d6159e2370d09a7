"""
A pipeline of three models on graphs
====================================

Does a pipeline make the same image if its text encoder, its UNet and the decoder of its VAE run as ONNX graphs?
"""

from tempfile import TemporaryDirectory

import torch
from torch import nn

import exportkit


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(3, 4, 2, stride=2), nn.ConvTranspose2d(4, 3, 2, stride=2)

    def decode(self, latents):
        return self.decoder(latents).sigmoid()


class Pipeline:
    """Stands for any object that holds models, such as a pipeline of diffusers."""

    def __init__(self):
        self.text_encoder, self.unet, self.vae = nn.EmbeddingBag(50, 4), nn.Conv2d(4, 4, 3, padding=1), VAE()

    @torch.no_grad()
    def __call__(self, prompts, steps=2, size=8):
        context = self.text_encoder(prompts)
        latents = torch.randn(len(prompts), 4, size, size)
        for _ in range(steps):
            latents = latents - 0.1 * self.unet(latents + context[:, :, None, None])
        return self.vae.decode(latents)


# %%
# The observer finds the methods that a run calls. Each of them becomes a graph, and all are proven together.

torch.manual_seed(0)
pipe, observer, folder = Pipeline(), exportkit.InputObserver(), TemporaryDirectory()
with observer(pipe):
    pipe(torch.randint(50, (1, 5)))
    pipe(torch.randint(50, (2, 7)), size=12)
exportkit.export(pipe, observer).save(folder.name)
onnx_model = exportkit.load(folder.name)
print(list(onnx_model.parts), onnx_model.verify().verdict())

# %%
# The pipeline runs twice with the same noise: with its models, and with the graphs in their place.

prompts = torch.randint(50, (3, 6))
print(exportkit.compare_runs(lambda: pipe(prompts, steps=4, size=16), pipe, onnx_model))
