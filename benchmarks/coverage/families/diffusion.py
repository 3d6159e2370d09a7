"""Diffusion models of diffusers, and loops over their schedulers."""

import torch
from cases import case, randn
from torch import nn

IMAGES, MORE_IMAGES = [(2, 16), (3, 32)], [(1, 24), (2, 48)]
_BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}


def _time(rows):
    return torch.randint(0, 1000, (rows,))


def _unet():
    from diffusers import UNet2DModel

    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    return UNet2DModel(
        in_channels=3, out_channels=3, attention_head_dim=8, down_block_types=down, up_block_types=up, **_BLOCKS
    )


def _conditional_unet():
    from diffusers import UNet2DConditionModel

    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    return UNet2DConditionModel(
        cross_attention_dim=8, attention_head_dim=2, down_block_types=down, up_block_types=up, **_BLOCKS
    )


def _autoencoder():
    from diffusers import AutoencoderKL

    down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
    return AutoencoderKL(latent_channels=4, down_block_types=down, up_block_types=up, **_BLOCKS)


@case(IMAGES, MORE_IMAGES)
def unet_2d():
    model = _unet()
    return model, lambda batch, side: model(randn(batch, 3, side, side), _time(batch))


@case([(2, 16, 10), (3, 32, 500)], [(1, 24, 20), (2, 48, 900)])
def unet_2d_with_one_time():
    model = _unet()
    return model, lambda batch, side, time: model(randn(batch, 3, side, side), time)


@case([(2, 16, 5), (3, 32, 8)], [(1, 24, 6), (2, 48, 12)])
def unet_2d_conditional():
    model = _conditional_unet()
    return model, lambda batch, side, words: model(
        randn(batch, 4, side, side), _time(batch), encoder_hidden_states=randn(batch, words, 8)
    )


@case([(2, 16, 5), (3, 32, 8)], [(1, 24, 6), (2, 48, 12)])
def unet_2d_conditional_as_tuple():
    model = _conditional_unet()
    return model, lambda batch, side, words: model(
        randn(batch, 4, side, side), torch.tensor(500), randn(batch, words, 8), return_dict=False
    )


@case([(2, 16, 5), (3, 32, 8)], [(1, 24, 6), (2, 48, 12)])
def control_net():
    from diffusers import ControlNetModel

    model = ControlNetModel(
        cross_attention_dim=8,
        attention_head_dim=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        conditioning_embedding_out_channels=(8, 16),
        **_BLOCKS,
    )
    return model, lambda batch, side, words: model(
        randn(batch, 4, side, side), _time(batch), randn(batch, words, 8), randn(batch, 3, 2 * side, 2 * side)
    )


@case([(2, 16), (3, 32)], [(1, 24), (4, 64)])
def unet_1d():
    from diffusers import UNet1DModel

    model = UNet1DModel(
        in_channels=6,
        out_channels=6,
        extra_in_channels=0,
        block_out_channels=(8, 8),
        down_block_types=("DownResnetBlock1D", "DownResnetBlock1D"),
        up_block_types=("UpResnetBlock1D",),
        mid_block_type="MidResTemporalBlock1D",
        out_block_type="OutConv1DBlock",
        use_timestep_embedding=True,
        norm_num_groups=4,
        act_fn="mish",
        time_embedding_type="positional",
        layers_per_block=1,
    )
    return model, lambda batch, steps: model(randn(batch, 6, steps), _time(batch))


@case(IMAGES, MORE_IMAGES)
def autoencoder_forward():
    model = _autoencoder()
    return model, lambda batch, side: model(randn(batch, 3, side, side))


@case(IMAGES, MORE_IMAGES, method="encode")
def autoencoder_encode():
    model = _autoencoder()
    return model, lambda batch, side: model.encode(randn(batch, 3, side, side))


@case([(2, 8), (3, 16)], [(1, 12), (2, 24)], method="decode")
def autoencoder_decode():
    model = _autoencoder()
    return model, lambda batch, side: model.decode(randn(batch, 4, side, side))


@case(IMAGES, MORE_IMAGES)
def autoencoder_with_codes():
    from diffusers import VQModel

    model = VQModel(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        num_vq_embeddings=16,
        latent_channels=3,
        **_BLOCKS,
    )
    return model, lambda batch, side: model(randn(batch, 3, side, side))


@case(IMAGES, MORE_IMAGES)
def autoencoder_tiny():
    from diffusers import AutoencoderTiny

    model = AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    )
    return model, lambda batch, side: model(randn(batch, 3, side, side))


@case([(2, 1), (3, 2)], [(1, 3), (4, 1)], method="decode")
def autoencoder_of_audio():
    from diffusers import AutoencoderOobleck

    model = AutoencoderOobleck(
        encoder_hidden_size=8,
        downsampling_ratios=[2, 2],
        channel_multiples=[1, 2],
        decoder_channels=8,
        decoder_input_channels=8,
    )
    return model, lambda batch, length: model.decode(randn(batch, 8, 10 * length))


@case([(2,), (3,)], [(1,), (5,)])
def diffusion_transformer():
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=4
    )
    return model, lambda batch: model(
        randn(batch, 4, 8, 8), timestep=_time(batch), class_labels=torch.randint(0, 1000, (batch,))
    )


@case([(2, 16, 5), (3, 32, 8)], [(1, 24, 6), (2, 48, 12)])
def stable_diffusion_three():
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=32,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        caption_projection_dim=16,
        pooled_projection_dim=10,
        out_channels=4,
        pos_embed_max_size=64,
    )
    return model, lambda batch, side, words: model(
        randn(batch, 4, side, side), randn(batch, words, 12), randn(batch, 10), _time(batch)
    )


@case([(2, 4, 5), (3, 6, 8)], [(1, 5, 6), (2, 8, 12)])
def flux():
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=10,
        axes_dims_rope=(4, 4, 8),
    )

    def use(batch, side, words):
        grid = torch.stack(
            torch.meshgrid(torch.zeros(1).long(), torch.arange(side), torch.arange(side), indexing="ij"), -1
        )
        model(
            hidden_states=randn(batch, side * side, 4),
            encoder_hidden_states=randn(batch, words, 12),
            pooled_projections=randn(batch, 10),
            timestep=torch.rand(batch),
            img_ids=grid.reshape(-1, 3).float(),
            txt_ids=torch.zeros(words, 3),
        )

    return model, use


@case([(2, 5), (3, 8)], [(1, 6), (4, 12)])
def pixart():
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        sample_size=8,
        num_layers=1,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=12,
        cross_attention_dim=16,
        in_channels=4,
        out_channels=8,
        use_additional_conditions=False,
    )
    return model, lambda batch, words: model(
        randn(batch, 4, 8, 8),
        encoder_hidden_states=randn(batch, words, 12),
        timestep=_time(batch),
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    )


@case([(2, 2, 4, 4), (3, 3, 4, 6)], [(1, 2, 6, 4), (2, 4, 8, 4)])
def ltx_video():
    from diffusers import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=1,
        caption_channels=12,
    )

    def use(batch, frames, height, width):
        model(
            hidden_states=randn(batch, frames * height * width, 4),
            encoder_hidden_states=randn(batch, 6, 12),
            timestep=_time(batch),
            encoder_attention_mask=torch.ones(batch, 6).bool(),
            num_frames=frames,
            height=height,
            width=width,
        )

    return model, use


@case([(2, 4), (1, 3)], [(1, 5), (3, 2)])
def unet_of_video():
    from diffusers import UNet3DConditionModel

    model = UNet3DConditionModel(
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=8,
        attention_head_dim=8,
        norm_num_groups=4,
        layers_per_block=1,
    )
    return model, lambda batch, frames: model(
        randn(batch, 4, frames, 16, 16), _time(batch), encoder_hidden_states=randn(batch, 5, 8)
    )


class Sampler(nn.Module):
    """Some steps of a scheduler, from noise to a sample."""

    def __init__(self, scheduler, steps):
        super().__init__()
        self.net, self.scheduler = nn.Conv2d(3, 3, 3, padding=1), scheduler
        scheduler.set_timesteps(steps)

    def forward(self, noise):
        sample = noise * self.scheduler.init_noise_sigma
        for step in self.scheduler.timesteps:
            found = self.net(self.scheduler.scale_model_input(sample, step))
            sample = self.scheduler.step(found, step, sample, return_dict=False)[0]
        return sample


@case(IMAGES, MORE_IMAGES)
def loop_over_ddim_steps():
    from diffusers import DDIMScheduler

    model = Sampler(DDIMScheduler(), 4)
    return model, lambda batch, side: model(randn(batch, 3, side, side))


@case(IMAGES, MORE_IMAGES)
def denoising_loop_in_place():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Conv2d(4, 3, 3, padding=1)
            betas = torch.linspace(1e-4, 0.02, 6)
            self.register_buffer("alphas", 1 - betas)
            self.register_buffer("products", (1 - betas).cumprod(0))

        def forward(self, x):
            for time in reversed(range(6)):
                level = x.new_full((x.shape[0], 1, *x.shape[2:]), time / 6)
                noise = self.net(torch.cat([x, level], 1))
                alpha, product = self.alphas[time], self.products[time]
                x = (x - (1 - alpha) / (1 - product).sqrt() * noise) / alpha.sqrt()
            return x.clamp(-1, 1)

    model = Loop()
    return model, lambda batch, side: model(randn(batch, 3, side, side))


@case([(2, 16, 7.5), (3, 32, 3.0)], [(1, 24, 5.0), (2, 48, 1.0)])
def guidance_without_a_classifier():
    class Guided(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.condition = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(4, 3)

        def forward(self, x, condition, guidance):
            both = self.net(torch.cat([x, x])) + self.condition(torch.cat([condition * 0, condition]))[..., None, None]
            free, bound = both.chunk(2)
            return free + guidance * (bound - free)

    model = Guided()
    return model, lambda batch, side, guidance: model(randn(batch, 3, side, side), randn(batch, 4), guidance)
