"""Default configurations of transformers made small, by the names of their fields alone."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

VOCABULARY, LAYERS, IMAGE, WIDTH, HEADS = 99, 2, 32, 64, 4
_LARGEST = 100_000_000  # parameters
_LARGEST_IMAGE = 512
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
_GROUPS = re.compile(r"(\w+_)?(n|num)_?(expert_)?groups?")
_SHARED = re.compile(r"num_(\w+_)?shared_layers")
_QUERIES = re.compile(r"num_(\w+_)?quer(ies|y_tokens)")
_INNER = re.compile(r"(\w+_)?(intermediate_(size|dim)|ffn_(dim|size)|mlp_dim|d_ff|inner_dim|n_inner|dim_feedforward)")
_HEAD_WIDTH = re.compile(r"(\w+_)?head_?dim|d_kv|(\w+_)?head_size|kv_channels|attention_head_size|\w+_d_head")
_WIDTH = re.compile(
    r"(\w+_)?(hidden_size|hidden_dim|d_model|embed_dim|embedding_size|embedding_dim|projection_dim|projection_size"
    r"|intermediate_size|intermediate_dim|ffn_dim|ffn_size|feedforward_dim|mlp_dim|d_ff|inner_dim|n_embd|n_inner|dim"
    r"|channels|hidden_channels|rank|state_size|width|conv_dim|emb_size|fc_size|d_ssm|dim_feedforward|feature_size"
    r"|bottleneck_features)|(?!num_)[a-z]+_groups"
    r"|(\w+_)?(hidden_sizes|embed_dims|widths|dims|out_channels|neck_hidden_sizes|encoder_hidden_dims|channel_list"
    r"|embed_dim_per_stage)"
)
_FIRST_WIDTH = re.compile(r"num_filters|\w+_initial_channel")  # from which those of other layers follow
_FIXED = re.compile(r"(num_|in_|out_|image_|input_)?channels|num_channels|patch_dim|in_chans|.*_token_id|.*rope_theta")
_LENGTH = re.compile(
    r"max_(\w+_)?(position_embeddings|positions|length|seq_len|sequence_length)|n_positions|n_ctx|context_length"
)


def levels(config: Any, again: bool) -> Iterator[Any]:
    """Yields smaller configurations, from the smallest on.

    Args:
        config: The default configuration.
        again: The small configurations are completed and made again. Only then, images that are larger than
            ``_LARGEST_IMAGE`` may stay so large.
    """
    for level in _LEVELS:
        if not again and "image" not in level and _image(config) > _LARGEST_IMAGE:
            continue
        small = copy.deepcopy(config)
        _shrink(small, level | {"again"} if again else level)
        try:
            yield _again(small, config) if again else small
        except Exception:  # not every configuration can be made so small
            continue


def _image(config: Any) -> int:
    """The largest side of an image, in the configuration or one nested in it."""
    side = getattr(config, "image_size", None) or 0
    nested = [_image(part) for part in vars(config).values() if hasattr(part, "sub_configs")]
    return max(0, *(side if isinstance(side, list | tuple) else [side]), *nested)


def _again(small: Any, config: Any) -> Any:
    """The small configuration, completed, and made again, so that what it computes from its fields follows them."""
    from transformers import PretrainedConfig

    given, computed, layers = {}, [], getattr(config, "num_hidden_layers", None)
    for field in dataclasses.fields(small):
        name = field.name
        if hasattr(PretrainedConfig, name) or name.startswith("_") or not hasattr(small, name):
            continue
        value = given[name] = getattr(small, name)
        if isinstance(value, PretrainedConfig):
            given[name] = _again(value, getattr(config, name))
        elif value is None or _SHARED.fullmatch(name):
            given[name] = _missing(name, small)
        elif isinstance(value, list) and len(value) == layers:
            given[name] = value[: small.num_hidden_layers]
        if field.default is None and not isinstance(value, PretrainedConfig):
            computed.append(name)
    stages = getattr(config, "out_features", None) or ()
    if len(stages) > 1 and "num_hidden_layers" in given:
        given["num_hidden_layers"] = len(stages)
    computed = [name for name in computed if not (isinstance(given[name], list) and isinstance(given[name][0], str))]
    first = type(small)(**{name: value for name, value in given.items() if name not in computed})
    for name in computed:
        if getattr(first, name) != getattr(config, name):
            del given[name]
    for name, value in given.items():
        if name.endswith("feature_sizes"):
            given[name] = [[side * _image(small) // _image(config) for side in sides] for sides in value]
    if stages:
        given["out_indices"] = list(range(1, len(first.stage_names)))
    made = type(small)(**given)
    if hasattr(made, "vision_config") and not hasattr(made, "vision_start_token_id"):
        made.vision_start_token_id, made.vision_end_token_id = VOCABULARY, VOCABULARY
    _rope(made)
    _tokens(made)
    return made


def _missing(name: str, config: Any) -> Any:
    """A value for a field that is None."""
    heads = getattr(config, "num_attention_heads", None)
    if name == "num_key_value_heads":
        return heads
    if name == "head_dim" and heads:
        return config.hidden_size // heads
    if _EXPERTS.fullmatch(name) or _CHOSEN.fullmatch(name):
        return 2 if _CHOSEN.fullmatch(name) else 4
    if name == "mlp_layer_types":
        return ["dense"] + ["sparse"] * (config.num_hidden_layers - 1)
    if name.startswith("default_"):  # one of a list
        return next(iter(getattr(config, name.removeprefix("default_") + "s", ())), None)
    if name.endswith("out_channels"):
        return [16, 16]
    return 0 if _SHARED.fullmatch(name) else None


def _rope(config: Any) -> None:
    """Rotations get sections that fill half of a head, and parameters for each kind of layer."""
    rope, heads = getattr(config, "rope_parameters", None), getattr(config, "num_attention_heads", None)
    if not isinstance(rope, dict) or (rope and "rope_type" not in rope) or not heads:
        return
    rope |= {"rope_type": rope.get("rope_type", "default"), "rope_theta": rope.get("rope_theta", 10_000.0)}
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    half = int(width * rope.get("partial_rotary_factor", 1)) // 2
    rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    for kind in {*(getattr(config, "layer_types", None) or ())}:
        rope[kind] = {name: value for name, value in rope.items() if not isinstance(value, dict)}


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
    text = config.get_text_config()
    return cls(config if isinstance(config, cls.config_class) or not isinstance(text, cls.config_class) else text)


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
    if re.fullmatch(r"(\w+_)?(vocab|vocabulary)_size(_per_layer_input)?", name):
        return min(value, VOCABULARY)
    if _DEPTH.fullmatch(name):
        return min(value, LAYERS if "depth" in level else _DEEPEST)
    if _LENGTH.fullmatch(name):
        return min(value, 128)
    if _QUERIES.fullmatch(name):
        return min(value, 8)
    if name == "image_size" and "image" in level:
        return min(value, 2 * IMAGE if "again" in level else IMAGE)
    if name == "patch_size" and "image" in level:
        return min(value, 16 if "again" in level else 8)
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
    if "again" in level and _FIRST_WIDTH.fullmatch(name):
        return _power(value, 24, None, 4)
    if "again" in level and name == "num_pos_feats":  # half of a width
        return WIDTH // 2 if "equal" in level else _power(value, 24, None, 8)
    if _HEADS.fullmatch(name):
        return _power(value, 4, HEADS)
    if _HEAD_WIDTH.fullmatch(name):
        return max(8, value // 8)
    return _power(value, 24, None, 16) if _WIDTH.fullmatch(name) else value


def _small_list(name: str, values: list[int], level: set[str]) -> list[int]:
    if name in ("depths", "num_blocks", "layers_per_stage", "blocks_per_stage", "num_layers"):
        return [min(value, 1) for value in values] if "depth" in level else values
    if name == "image_size":
        return [_small(name, value, level) for value in values]
    if not level & {"width", "equal"} or name in ("kernel_size", "strides", "num_channels"):
        return values
    if _HEADS.fullmatch(name):
        return [_power(value, 4, HEADS) for value in values]
    if not _WIDTH.fullmatch(name):
        return values
    if "again" in level:  # widths that differ stay different, or become equal
        least = _power(min(values), 24, None, 16)
        return [WIDTH if "equal" in level else value * least // min(values) for value in values]
    return [_power(value, 24, None, 16) for value in values]


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
