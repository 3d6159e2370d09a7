"""Tiny models of many kinds, each with what it takes to generate: for plans that must be right from batch 1 alone."""

from __future__ import annotations

import inspect

import torch

import exportkit

VOCABULARY, IMAGE_TOKEN = 99, 98
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def ids(length, batch=1):
    return torch.randint(3, 90, (batch, length))


def padded_left(length):
    tokens = ids(length)
    mask = torch.ones_like(tokens)
    tokens[0, 0] = mask[0, 0] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def observed(model, inputs, tokens=4):
    """The observer of a model that generates tokens."""
    model.generation_config.eos_token_id = None
    observer = exportkit.InputObserver()
    with observer(model, store_n_calls=tokens), torch.no_grad():
        model.generate(**inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return observer


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TEXT)), padded_left(7)


def gemma3_text():
    """A sliding window of 6 that the prompt of 7 tokens fills."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**TEXT, head_dim=8, sliding_window=6, layer_types=layers)
    return Gemma3ForCausalLM(config), padded_left(7)


def falcon_h1(**changes):
    """Attention and a state-space mixer in each layer."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    config = FalconH1Config(
        **{**TEXT, **changes},
        head_dim=8,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=8,
    )
    return FalconH1ForCausalLM(config), {"input_ids": ids(7)}


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    tokens = ids(7)
    mask = torch.ones_like(tokens)
    tokens[0, -1] = mask[0, -1] = 0
    return T5ForConditionalGeneration(config), {"input_ids": tokens, "attention_mask": mask}


def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=10,
        max_target_positions=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(1, 8, 20),
        "decoder_input_ids": ids(7),
    }


def speech_to_text():
    """The mask is over frames, of which the encoder makes a state out of each four; the last frames are hidden."""
    from transformers import Speech2TextConfig, Speech2TextForConditionalGeneration

    config = Speech2TextConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=200,
        max_target_positions=64,
        conv_channels=32,
        input_feat_per_channel=8,
        vocab_size=VOCABULARY,
        decoder_start_token_id=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    mask = torch.ones(1, 26, dtype=torch.int64)
    mask[0, -3:] = 0
    model = Speech2TextForConditionalGeneration(config)
    return model, {"input_features": torch.randn(1, 26, 8), "attention_mask": mask}


def speech_encoder_decoder():
    """An encoder of samples, without a mask, and a decoder that was made for text."""
    from transformers import BertConfig, SpeechEncoderDecoderConfig, SpeechEncoderDecoderModel, Wav2Vec2Config

    layers = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    encoder = Wav2Vec2Config(
        **layers,
        conv_dim=(8, 8),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    decoder = BertConfig(
        **layers, vocab_size=VOCABULARY, max_position_embeddings=128, is_decoder=True, add_cross_attention=True
    )
    config = SpeechEncoderDecoderConfig(encoder=encoder.to_dict(), decoder=decoder.to_dict())
    model = SpeechEncoderDecoderModel(config)
    for settings in (model.config, model.generation_config):
        settings.decoder_start_token_id, settings.pad_token_id = 2, 0
    return model, {"inputs": torch.randn(1, 300)}


def qwen2_5_vl():
    """Positions are (4, batch, sequence), and image features are flat rows."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "in_channels": 3,
    }
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        video_token_id=97,
        vision_start_token_id=95,
        vision_end_token_id=96,
    )
    tokens = ids(12)
    tokens[:, 0], tokens[:, 1:5] = 95, IMAGE_TOKEN
    inputs = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    model = Qwen2_5_VLForConditionalGeneration(config)
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        inputs["mm_token_type_ids"] = (tokens == IMAGE_TOKEN).int()
    return model, inputs
