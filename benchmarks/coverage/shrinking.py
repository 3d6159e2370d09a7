"""Default configurations of transformers made small, by the names of their fields alone."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

VOCABULARY, LAYERS, IMAGE, WIDTH, HEADS = 99, 2, 32, 64, 4
_LARGEST = 100_000_000  # parameters
# What is made small, from the smallest models on; a default configuration may need some of its numbers. With equal
# widths, the parts of a model fit together even where the defaults of their configurations do not.
_LEVELS = (
    {"image", "depth", "width"},
    {"image", "depth", "equal"},
    {"depth", "width"},
    {"depth", "equal"},
    {"width"},
    {"equal"},
    {"depth"},
)
_DEEPEST = 12

_DEPTH = re.compile(
    r"(num|n)_(\w+_)?(layers?|blocks|stages_layers)|(\w+_)?(layers|depth)|num_hidden_layers|num_blocks_per_stage"
)
_HEADS = re.compile(r"(\w+_)?(num|n)_(\w+_)?heads?|(\w+_)?attention_heads|num_key_value_heads|\w+_n_heads")
_EXPERTS = re.compile(r"(num|n)_(\w+_)?experts|moe_num_experts")
_CHOSEN = re.compile(r"(\w+_)?experts_per_(tok|token)|(\w+_)?top_?k(_experts)?|moe_k")
_GROUPS = re.compile(r"(\w+_)?(n|num)_?groups?")
_QUERIES = re.compile(r"num_(\w+_)?quer(ies|y_tokens)")
_INNER = re.compile(r"(\w+_)?(intermediate_(size|dim)|ffn_(dim|size)|mlp_dim|d_ff|inner_dim|n_inner|dim_feedforward)")
_HEAD_WIDTH = re.compile(r"(\w+_)?head_?dim|d_kv|(\w+_)?head_size|kv_channels|attention_head_size|\w+_d_head")
_WIDTH = re.compile(
    r"(\w+_)?(hidden_size|hidden_dim|d_model|embed_dim|embedding_size|embedding_dim|projection_dim|projection_size"
    r"|intermediate_size|intermediate_dim|ffn_dim|ffn_size|feedforward_dim|mlp_dim|d_ff|inner_dim|n_embd|n_inner|dim"
    r"|channels|hidden_channels|rank|state_size|width|conv_dim|emb_size|fc_size|d_ssm|dim_feedforward|feature_size)"
    r"|(\w+_)?(hidden_sizes|embed_dims|widths|dims|out_channels|neck_hidden_sizes|encoder_hidden_dims)"
)
_FIXED = re.compile(r"(num_|in_|out_|image_|input_)?channels|num_channels|patch_dim|in_chans|.*_token_id|.*rope_theta")
_LENGTH = re.compile(r"max_(\w+_)?(position_embeddings|positions|length|seq_len|sequence_length)|n_positions|n_ctx")


def levels(config: Any) -> Iterator[Any]:
    """Yields smaller configurations, from the smallest on."""
    for level in _LEVELS:
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


def _shrink(config: Any, level: set[str]) -> None:
    from transformers import PretrainedConfig

    given = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for name, value in given.items():
        if isinstance(value, PretrainedConfig):
            _shrink(value, level)
        elif isinstance(value, dict):
            small = {key: _nested(key, part) for key, part in value.items()}
            setattr(config, name, small if level & {"width", "equal"} else value)
        elif (small := _small(name, value, level)) is not value:
            _set(config, name, small)
    _tokens(config)
    if type(layers := given.get("num_hidden_layers")) is int and "depth" in level:
        _layers(config, layers)


def _layers(config: Any, count: int) -> None:
    """Lists with an entry for each layer keep one layer of each kind."""
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == count and "layer" in name
    }
    kinds = list(zip(*(value for value in lists.values() if isinstance(value[0], str)), strict=True))
    places = [place for place, kind in enumerate(kinds) if kind not in kinds[:place]]
    if len(places) < LAYERS:
        places = list(range(min(LAYERS, count)))
    if lists:
        _set(config, "num_hidden_layers", len(places))
    for name, value in lists.items():
        _set(config, name, type(value)(value[place] for place in places))


def _small(name: str, value: Any, level: set[str]) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, list | tuple) and value and all(type(part) is int for part in value):
        return type(value)(_small_list(name, list(value), level))
    if type(value) is not int:
        return value
    if name in ("vocab_size", "vocabulary_size") or name.endswith("_vocab_size"):
        return min(value, VOCABULARY)
    if _DEPTH.fullmatch(name):
        return min(value, LAYERS if "depth" in level else _DEEPEST)
    if _LENGTH.fullmatch(name):
        return min(value, 128)
    if _QUERIES.fullmatch(name):
        return min(value, 8)
    if name == "image_size" and "image" in level:
        return min(value, IMAGE)
    if name == "patch_size" and "image" in level:
        return min(value, 8)
    if not level & {"width", "equal"} or _FIXED.fullmatch(name):
        return value
    if _EXPERTS.fullmatch(name):
        return min(value, 4)
    if _CHOSEN.fullmatch(name) or _GROUPS.fullmatch(name):
        return min(value, 2)
    if name == "topk_group":
        return 1
    if name == "sliding_window":
        return min(value, 8)
    return _small_width(name, value, level)


def _small_width(name: str, value: int, level: set[str]) -> int:
    if "equal" in level:
        if _HEADS.fullmatch(name):
            return HEADS if "key_value" not in name else min(value, HEADS, 2)
        if _HEAD_WIDTH.fullmatch(name):
            return WIDTH // HEADS
        return 2 * WIDTH if _INNER.fullmatch(name) else WIDTH if _WIDTH.fullmatch(name) else value
    if _HEADS.fullmatch(name):
        return _power(value, 4, HEADS)
    if _HEAD_WIDTH.fullmatch(name):
        return max(8, value // 8)
    return _power(value, 24, None, 16) if _WIDTH.fullmatch(name) else value


def _small_list(name: str, values: list[int], level: set[str]) -> list[int]:
    if name in ("depths", "num_blocks", "layers_per_stage", "num_layers"):
        return [min(value, 1) for value in values] if "depth" in level else values
    if name == "image_size":
        return [min(value, IMAGE) for value in values] if "image" in level else values
    if not level & {"width", "equal"} or name in ("kernel_size", "strides", "num_channels"):
        return values
    if _HEADS.fullmatch(name):
        return [_power(value, 4, HEADS) for value in values]
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
