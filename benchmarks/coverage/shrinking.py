"""Default configurations of transformers made small, by the names of their fields alone."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

VOCABULARY, LAYERS, IMAGE = 99, 2, 32
_LARGEST = 40_000_000  # parameters

_DEPTH = re.compile(
    r"(num|n)_(\w+_)?(layers?|blocks|stages_layers)|(\w+_)?(layers|depth)|num_hidden_layers|num_blocks_per_stage"
)
_HEADS = re.compile(r"(\w+_)?(num|n)_(\w+_)?heads?|(\w+_)?attention_heads|num_key_value_heads|\w+_n_heads")
_EXPERTS = re.compile(r"(num|n)_(\w+_)?experts|moe_num_experts")
_CHOSEN = re.compile(r"(\w+_)?experts_per_(tok|token)|(\w+_)?top_?k(_experts)?|moe_k")
_HEAD_WIDTH = re.compile(r"(\w+_)?head_dim|d_kv|(\w+_)?head_size|kv_channels|attention_head_size|\w+_d_head")
_WIDTH = re.compile(
    r"(\w+_)?(hidden_size|hidden_dim|d_model|embed_dim|embedding_size|embedding_dim|projection_dim|projection_size"
    r"|intermediate_size|intermediate_dim|ffn_dim|ffn_size|feedforward_dim|mlp_dim|d_ff|inner_dim|n_embd|n_inner|dim"
    r"|channels|hidden_channels|rank|state_size|width|conv_dim|emb_size|fc_size|d_ssm|dim_feedforward|feature_size)"
    r"|(\w+_)?(hidden_sizes|embed_dims|widths|dims|out_channels|neck_hidden_sizes|encoder_hidden_dims)"
)
_FIXED = re.compile(r"(num_|in_|out_|image_|input_)?channels|num_channels|in_chans|.*_token_id|.*rope_theta")
_LENGTH = re.compile(r"max_(\w+_)?(position_embeddings|positions|length|seq_len|sequence_length)|n_positions|n_ctx")


def levels(config: Any) -> Iterator[Any]:
    """Yields smaller configurations, from the smallest on."""
    for level in (0, 1, 2):
        small = copy.deepcopy(config)
        _shrink(small, level)
        yield small


def small_model(config: Any, cls: Any) -> Any:
    """Returns a model with random weights and few parameters.

    Raises:
        ValueError: if the model is larger.
    """
    import torch

    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in _made(cls, copy.deepcopy(config)).parameters())
    if size > _LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    return _made(cls, config).float()


def _made(cls: Any, config: Any) -> Any:
    return cls(config if isinstance(config, cls.config_class) else config.get_text_config())


def _shrink(config: Any, level: int) -> None:
    from transformers import PretrainedConfig

    names = [name for name in vars(config) if not name.startswith("_")]
    depth = None
    for name in names:
        value = getattr(config, name)
        if isinstance(value, PretrainedConfig):
            _shrink(value, level)
        elif isinstance(value, dict):
            setattr(config, name, {key: _nested(key, part) for key, part in value.items()} if level < 2 else value)
        elif (small := _small(name, value, level)) is not value:
            _set(config, name, small)
        if name == "num_hidden_layers":
            depth = getattr(config, name)
    _tokens(config)
    types = vars(config).get("layer_types")
    if isinstance(types, list) and isinstance(depth, int):
        kinds = list(dict.fromkeys(types))
        _set(config, "num_hidden_layers", max(depth, len(kinds)))
        _set(config, "layer_types", (kinds * LAYERS)[: max(depth, len(kinds))])


def _small(name: str, value: Any, level: int) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, list | tuple) and value and all(type(part) is int for part in value):
        return _small_list(name, list(value), level)
    if type(value) is not int:
        return value
    if name in ("vocab_size", "vocabulary_size") or name.endswith("_vocab_size"):
        return min(value, VOCABULARY)
    if _DEPTH.fullmatch(name):
        return min(value, LAYERS)
    if _LENGTH.fullmatch(name):
        return min(value, 128)
    if level == 2 or _FIXED.fullmatch(name):
        return value
    if _EXPERTS.fullmatch(name):
        return min(value, 4)
    if _CHOSEN.fullmatch(name):
        return min(value, 2)
    if name == "image_size" and level == 0:
        return min(value, IMAGE)
    if name == "patch_size" and level == 0:
        return min(value, 8)
    if name == "sliding_window":
        return min(value, 8)
    if _HEADS.fullmatch(name):
        return _power(value, 4, 4)
    if _HEAD_WIDTH.fullmatch(name):
        return max(8, value // 8)
    return _power(value, 24, None, 16) if _WIDTH.fullmatch(name) else value


def _small_list(name: str, values: list[int], level: int) -> list[int]:
    if name in ("depths", "num_blocks", "layers_per_stage", "num_layers"):
        return [min(value, 1) for value in values]
    if level == 2 or name in ("kernel_size", "strides", "num_channels"):
        return values
    if name == "image_size":
        return [min(value, IMAGE) for value in values] if level == 0 else values
    if _HEADS.fullmatch(name):
        return [_power(value, 4, 4) for value in values]
    return [_power(value, 24, None, 16) for value in values] if _WIDTH.fullmatch(name) else values


def _nested(key: str, value: Any) -> Any:
    """A value in a dict such as ``rope_parameters``: the sections of a head follow its width."""
    return [max(1, part // 8) for part in value] if key == "mrope_section" else value


def _power(value: int, divisor: int, most: int | None, least: int = 1) -> int:
    """A power of two near a part of the value: widths stay divisible by numbers of heads."""
    power = max(least, 1 << max(0, value // divisor).bit_length() - 1 if value >= divisor else least)
    return min(value, power, most or power)


def _tokens(config: Any) -> None:
    """Special tokens have to be in the vocabulary, and to differ."""
    free = iter(range(VOCABULARY - 1, 50, -1))
    for name, value in list(vars(config).items()):
        if (
            re.fullmatch(r"\w+_token_(id|index)|\w+_token|\w+_index", name)
            and type(value) is int
            and value >= VOCABULARY - 20
        ):
            _set(config, name, next(free))
    for name, value in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)):
        given = vars(config).get(name)
        if isinstance(given, list) or (type(given) is int and given >= VOCABULARY - 20):
            _set(config, name, value)


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except (AttributeError, ValueError, NotImplementedError):  # computed from other fields, or checked against them
        return
