"""A case for each model type of transformers that its automatic classes know, with inputs made from its signature."""

from __future__ import annotations

import functools
import inspect
import itertools
import random
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from cases import Case, Sizes, ints, randn
from shrinking import VOCABULARY, levels, small_model

# The tasks, each with its mapping; a type is tried in the first task that has it.
_TASKS = (
    ("causal language model", "CAUSAL_LM"),
    ("sequence to sequence", "SEQ_TO_SEQ_CAUSAL_LM"),
    ("speech to text", "SPEECH_SEQ_2_SEQ"),
    ("image and text to text", "IMAGE_TEXT_TO_TEXT"),
    ("masked language model", "MASKED_LM"),
    ("speech with alignment", "CTC"),
    ("object detection", "OBJECT_DETECTION"),
    ("zero-shot object detection", "ZERO_SHOT_OBJECT_DETECTION"),
    ("segmentation", "SEMANTIC_SEGMENTATION"),
    ("universal segmentation", "UNIVERSAL_SEGMENTATION"),
    ("depth estimation", "DEPTH_ESTIMATION"),
    ("image classification", "IMAGE_CLASSIFICATION"),
    ("video classification", "VIDEO_CLASSIFICATION"),
    ("zero-shot image classification", "ZERO_SHOT_IMAGE_CLASSIFICATION"),
    ("audio classification", "AUDIO_CLASSIFICATION"),
    ("text to waveform", "TEXT_TO_WAVEFORM"),
    ("time series", "TIME_SERIES_PREDICTION"),
    ("backbone", "BACKBONE"),
    ("model", ""),
)
_GENERATES = ("causal language model", "sequence to sequence", "speech to text", "image and text to text")
# Images are given one for each row; or with an axis for several of each row, or patches with one axis for their values;
# or not at all, where none of these succeeds.
_IMAGES = ("one", "several", "none")
# At last, all inputs that hold tokens are given, in one call instead of ``generate``.
_TOKENS = "tokens"
# The inputs that hold the shape of each image, of which the pixels are given as patches.
_GRIDS = ("image_grid_thw", "grid_thw", "grid_thws", "spatial_shapes", "target_sizes")
_FIRST_LAYERS = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d)
# The fields that hold the width of features of sound; and those with the widths of inputs for each step of an episode.
_BINS = ("input_size", "num_mel_bins", "feature_size")
_STEPS = {"states": "state_dim", "actions": "act_dim", "rewards": "", "returns_to_go": ""}
_IMAGE_MASK = "image_embeds_position_mask"
_Inputs = Callable[[int, int], dict[str, torch.Tensor]]
_TEXT, _TEXT_TRUTH = [(2, 7)], [(3, 5), (1, 11)]
_ONE, _ONE_TRUTH = [(1, 7)], [(1, 5), (2, 9)]
_ROWS, _ROWS_TRUTH = [(2, 7), (3, 9)], [(1, 12), (4, 5)]


def cases(
    left_out: Iterable[Path], sample: int | None, seed: int, batch_one: bool, drawn: Collection[str] = ()
) -> list[Case]:
    """Returns the cases.

    Args:
        left_out: Files and folders; types that they name are left out.
        sample: How many types; by default all.
        seed: The sample is drawn with this seed.
        batch_one: Record one row, of the types that generate.
        drawn: The types of this sample, if it was drawn before. It stays when tests name some of them afterwards.
    """
    text = " ".join(file.read_text() for path in left_out for file in (path.rglob("*.py") if path.is_dir() else [path]))
    known = set(re.findall(r"\w+", text))
    found = [(name, *rest) for name, *rest in _types() if not {name, rest[1]} & known]
    if drawn:
        found = [(name, *rest) for name, *rest in _types() if name in drawn]
    elif sample is not None:
        found = random.Random(seed).sample(found, min(sample, len(found)))
    return [_case(name, task, cls, batch_one) for name, task, _, cls in found if not batch_one or task in _GENERATES]


def _types() -> list[tuple[str, str, str, str]]:
    """Model type, task, name of the configuration class, and name of the model class."""
    from transformers.models.auto import configuration_auto, modeling_auto

    seen, found = set(), []
    for task, key in _TASKS:
        middle = f"FOR_{key}_" if key not in ("", "BACKBONE") else f"{key}_" if key else ""
        mapping = getattr(modeling_auto, f"MODEL_{middle}MAPPING_NAMES", {})
        for name, classes in mapping.items():
            if name in configuration_auto.CONFIG_MAPPING_NAMES and name not in seen:
                seen.add(name)
                cls = classes if isinstance(classes, str) else classes[0]
                found.append((name, task, configuration_auto.CONFIG_MAPPING_NAMES[name], cls))
    return sorted(found)


def _case(name: str, task: str, cls: str, batch_one: bool) -> Case:
    if task in _GENERATES:
        recorded, truth = (_ONE, _ONE_TRUTH) if batch_one else (_TEXT, _TEXT_TRUTH)
    else:
        recorded, truth = _ROWS, _ROWS_TRUTH
    make = functools.partial(_make, name, cls, task, [*recorded, *truth], batch_one)
    return Case(f"{name} at batch 1" if batch_one else name, task, make, recorded, truth, plain=False)


def _make(
    name: str, cls: str, task: str, runs: list[Sizes], batch_one: bool
) -> tuple[torch.nn.Module, Callable[..., object]]:
    """The model in the smallest size, and with the richest inputs, with which all runs succeed."""
    import transformers

    error: Exception | None = None
    maker = getattr(transformers, cls)
    ways = _IMAGES if "pixel_values" in inspect.signature(maker.forward).parameters else _IMAGES[:1]
    config = transformers.AutoConfig.for_model(name)
    first = ((small, way) for small in levels(config, False) for way in ways)
    last = ((small, way) for way in (*ways, _TOKENS) for small in levels(config, True))
    for small, way in itertools.chain(first, last):
        if task == _TASKS[0][0] and hasattr(small, "is_decoder"):
            small.is_decoder = True
        try:
            model = small_model(small, maker).eval()
            given = functools.partial(inputs, model, way)
            generates = task in _GENERATES and way != _TOKENS
            use = _generating(model, given, not batch_one) if generates else _called(model, given)
            calls: list[object] = []
            hook = model.register_forward_pre_hook(lambda *_, calls=calls: calls.append(None))
            with torch.no_grad():
                for sizes in runs:
                    use(*sizes)
            hook.remove()
            if calls:
                return model, use
            error = error or ValueError("generate does not call forward")
        except Exception as found:
            error = error or found
    raise error or RuntimeError(name)


def _generating(model: Any, inputs: _Inputs, padded: bool) -> Callable[..., object]:
    """A run of ``generate``, three tokens long."""
    settings = model.generation_config
    if model.config.is_encoder_decoder and settings.bos_token_id is None:
        settings.bos_token_id = 1
    settings.eos_token_id = settings.forced_eos_token_id = None
    settings.pad_token_id = settings.pad_token_id or 0
    settings.max_length = None

    def use(batch: int, length: int) -> object:
        given = inputs(batch, length)
        if padded and "attention_mask" in given and given["attention_mask"].shape == (batch, length):
            where = -1 if model.config.is_encoder_decoder else 0
            given["attention_mask"][0, where] = 0
        given.pop("decoder_input_ids", None)
        return model.generate(**given, max_new_tokens=3, min_new_tokens=3, do_sample=False)

    return use


def _called(model: Any, inputs: _Inputs) -> Callable[..., object]:
    return lambda batch, length: model(**inputs(batch, length))


def inputs(model: Any, images: str, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Returns random inputs: those that the signature requires, the main one, and what belongs to them.

    Args:
        model: The model.
        images: How images are given: one of ``_IMAGES``; or ``_TOKENS``.
        batch: The number of rows.
        length: The number of tokens, or what inputs of other kinds have instead.
    """
    parameters = inspect.signature(model.forward).parameters
    names = [
        name
        for name, item in parameters.items()
        if item.default is item.empty and item.kind == item.POSITIONAL_OR_KEYWORD
    ]
    names.insert(0, model.main_input_name if model.main_input_name in parameters else names[0])
    if _image_token(model) is not None and "input_ids" in parameters:
        names.append("input_ids")
    if "pixel_values" in parameters and "input_ids" in names:
        names.append("pixel_values")
    if model.config.is_encoder_decoder and "decoder_input_ids" in parameters and not model.can_generate():
        names.append("decoder_input_ids")
    names += [name for name in ("bbox",) if name in parameters]
    if names[0] in _STEPS:
        names += [name for name in (*_STEPS, "timesteps") if name in parameters]
    if images == _TOKENS:
        names += [name for name in ("input_ids", "decoder_input_ids") if name in parameters]
    if images == "none":
        names = [name for name in names if name != "pixel_values"]
    grid = next((name for name in _GRIDS if name in parameters or name in _asked(model)), None)
    found: dict[str, torch.Tensor] = {}
    if grid and {"pixel_values", "hidden_states"} & {*names}:
        found = _patches(model, grid, "pixel_values" if "pixel_values" in names else "hidden_states", batch)
    found |= {name: _input(model, name, batch, length) for name in dict.fromkeys(names) if name not in found}
    if images == "several" and "pixel_values" in found:
        values = found["pixel_values"]
        found["pixel_values"] = values.flatten(1) if grid else values[:, None]
    if "input_ids" in found and "pixel_values" in found and _image_token(model) is not None:
        given = {name: value for name, value in found.items() if name in _asked(model)}
        found["input_ids"] = _with_image(model, found["input_ids"], given)
    if _IMAGE_MASK in parameters and "pixel_values" in found:
        found[_IMAGE_MASK] = (found["input_ids"] == _image_token(model)).int()
    if "mm_token_type_ids" in parameters and "pixel_values" in found and _image_token(model) is not None:
        found["mm_token_type_ids"] = (found["input_ids"] == _image_token(model)).int()
    if "attention_mask" in parameters and "input_ids" in found:
        found["attention_mask"] = torch.ones_like(found["input_ids"])
    return found


def _input(model: Any, name: str, batch: int, length: int) -> torch.Tensor:
    config = model.config
    if name in ("input_ids", "decoder_input_ids", "inputs"):
        return ints(batch, length, below=min(50, VOCABULARY))
    if name == "bbox":
        return torch.randint(0, 100, (batch, length, 2)).repeat(1, 1, 2).sort(-1).values
    if name in ("pixel_values", "pixel_values_videos", "images"):
        side = _field(config, "image_size", 64)
        height, width = side if isinstance(side, list | tuple) else (side, side)
        shape = [_field(config, "num_channels", 3), height, width]
        frames = _field(config, "num_frames", None)
        return randn(batch, *([frames] if frames else []), *shape)
    if name in ("input_values", "waveform"):
        bins = _field(config, "num_mel_bins", None)
        if bins and _field(config, "max_length", None):
            return randn(batch, config.max_length, bins)
        channels = _field(config, "audio_channels", None)
        return randn(batch, *([channels] if channels else []), 1600 + 160 * length)
    if name == "input_features":
        bins = next((_field(config, field, None) for field in _BINS if _field(config, field, None)), 80)
        frames = _field(config, "max_source_positions", None)
        if hasattr(config, "max_source_positions") and "conv" in str(list(dict(model.named_modules())))[:4000]:
            return randn(batch, bins, 2 * frames)
        return randn(batch, 40 + 4 * length, bins)
    if name in ("input_features_mask", "padding_mask"):
        return torch.ones(_input(model, "input_features", batch, length).shape[:2], dtype=torch.long)
    if name == "flattened_patches":
        places = torch.cartesian_prod(torch.arange(1, 5), torch.arange(1, 5)).float().expand(batch, -1, -1)
        return torch.cat(
            [places, randn(batch, 16, _field(config, "num_channels", 3) * _field(config, "patch_size", 16) ** 2)], -1
        )
    if name == "latents":
        return randn(batch, config.hidden_size, length)
    if name in _STEPS:
        return randn(batch, length, _field(config, _STEPS[name], 1))
    if name == "timesteps":
        return torch.arange(length).expand(batch, -1)
    if name == "past_values":
        return randn(batch, _field(config, "context_length", 32))
    raise ValueError(f"no rule for the input {name}")


def _patches(model: Any, grid: str, rows: str, batch: int) -> dict[str, torch.Tensor]:
    """Images as patches, four by four, with the shape of each."""
    patch, frames = _field(model.config, "patch_size", 14), _field(model.config, "temporal_patch_size", 1)
    channels = _field(model.config, "in_channels", 0) or _field(model.config, "num_channels", 3)
    layer = next(
        (part for name, part in model.named_modules() if "patch" in name and isinstance(part, _FIRST_LAYERS)), None
    )
    shape: tuple[int, ...] = (frames * channels * patch * patch,)
    if isinstance(layer, torch.nn.Conv2d):
        shape = (channels, patch, patch)
    elif isinstance(layer, torch.nn.Linear):
        shape = (layer.in_features,)
    if grid == "spatial_shapes":
        mask = torch.ones(batch, 16, dtype=torch.long)
        return {rows: randn(batch, 16, *shape), grid: torch.tensor([[4, 4]] * batch), "pixel_attention_mask": mask}
    if grid == "target_sizes":
        values = randn(1, channels, patch, 16 * batch * patch)
        return {rows: values, grid: torch.tensor([[4, 4]] * batch, dtype=torch.int32)}
    found = {rows: randn(16 * batch, *shape), grid: torch.tensor([[1, 4, 4]] * batch)}
    merges = {"image_merge_sizes": torch.tensor([2] * batch)}
    return found | {name: value for name, value in merges.items() if name in _asked(model)}


def _asked(model: Any) -> set[str]:
    """The inputs that features of images are made from."""
    found = {"pixel_values"}
    for part in (model, model.base_model):
        if hasattr(part, "get_image_features"):
            found |= {*inspect.signature(part.get_image_features).parameters}
    return found


def _field(config: Any, name: str, default: Any) -> Any:
    """A field of the configuration, or of one nested in it."""
    for part in (config, *(getattr(config, sub) for sub in config.sub_configs if hasattr(config, sub))):
        if part is not None and getattr(part, name, None) is not None:
            return getattr(part, name)
    return default


def _image_token(model: Any) -> int | None:
    token = getattr(model.config, "image_token_id", None) or getattr(model.config, "image_token_index", None)
    return token or (VOCABULARY - 1 if _IMAGE_MASK in inspect.signature(model.forward).parameters else None)


def _with_image(model: Any, tokens: torch.Tensor, images: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tokens behind placeholders, as many as an image has features."""
    count = _field(model.config, "latent_query_num", None)
    if count is None:
        encoder = model if hasattr(model, "get_image_features") else model.base_model
        with torch.no_grad():
            features = encoder.get_image_features(**images)
        features = getattr(features, "pooler_output", features)
        parts = features if isinstance(features, list | tuple) else [features]
        count = sum(part.flatten(0, -2).shape[0] for part in parts) // len(tokens)
    places = torch.full((len(tokens), count), _image_token(model))
    return torch.cat([tokens[:, :1], places, tokens[:, 1:]], 1)
