"""Loads a local checkpoint of transformers, with a run of its model: the usual one, or one on files of the user.

Anything wrong with the folder is reported before the model runs: a missing file, an architecture that transformers does
not have, weights that would stay random.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from exportkit.errors import DestinationError, InvalidRequestError, described
from exportkit.examples.run import OWN_CALLS, ExampleRun, default_run, forward_calls, generation
from exportkit.files import listing

_CONTENT = "a folder with config.json and *.safetensors"
_SAVE = "model.save_pretrained(folder) writes such a folder"


def load_checkpoint(
    folder: str | os.PathLike[str],
    task: str | None = None,
    data: Sequence[str | os.PathLike[str]] = (),
    outputs: Sequence[str] = (),
) -> ExampleRun:
    """Loads the model of a local checkpoint, with a run of it. Nothing is downloaded.

    The weights are loaded as float32 whatever their dtype in the files, because onnxruntime has float32 kernels on
    every machine.

    Args:
        folder: Folder with ``config.json``, ``*.safetensors`` and, if the model has a tokenizer or a processor, their
            files.
        task: A task of `transformers.pipeline`, which chooses the class of the model. By default, it is the class that
            the checkpoint was saved from.
        data: Files that the model runs on; see `data_run`. By default, the run is the usual one for the kind of model.
        outputs: Further outputs of the model, such as ``hidden_states``.

    Raises:
        DestinationError: if the folder, its configuration, its weights or the data cannot be read.
        InvalidRequestError: if the architecture is unknown, does not do the task, has no default run, or lacks the
            outputs.
    """
    path = Path(folder)
    _read_config(path)
    model = _load_model(path, (_model_class(path),) if task is None else _classes_of_task(task))
    for name in outputs:
        _return_too(model, name)
    return data_run(model, path, [Path(file) for file in data]) if data else default_run(model, _load_tokenizer(path))


def _classes_of_task(task: str) -> tuple[Any, ...]:
    """The auto classes of a task of `transformers.pipeline`."""
    from transformers.pipelines import check_task, get_supported_tasks

    try:
        _, found, _ = check_task(task)
    except KeyError as error:
        raise InvalidRequestError(
            "transformers has no pipeline for this task.",
            where="task",
            expected=", ".join(get_supported_tasks()),
            got=task,
        ) from error
    return tuple(found["pt"])


def _return_too(model: Any, name: str) -> None:
    """Makes a model return, for instance, its hidden states in each call."""
    option = f"output_{name}"
    known = sorted(key.removeprefix("output_") for key in dir(model.config) if key.startswith("output_"))
    if name not in known:
        raise InvalidRequestError(
            "The model has no such output.", where=type(model).__name__, expected=", ".join(known), got=name
        )
    if name == "attentions":
        model.set_attn_implementation("eager")  # other implementations never have them
    setattr(model.config, option, True)


def _model_class(folder: Path) -> Any:
    """The class that ``architectures`` in ``config.json`` names."""
    import transformers

    names = _read_config(folder).get("architectures") or ["no class"]
    found = getattr(transformers, str(names[0]), None)
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    raise InvalidRequestError(
        "The checkpoint's architecture is unknown.",
        where=f"architectures in {folder / 'config.json'}",
        expected=f"a model class of transformers {transformers.__version__}",
        got=names[0],
        hint=f"upgrade transformers if a newer version has it. If the model comes with its own code, {OWN_CALLS}",
    )


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise DestinationError(
            "The checkpoint folder does not exist.",
            where=str(folder),
            expected=_CONTENT,
            got=listing(folder),
            hint=f"{_SAVE}. exportkit does not download models from the Hugging Face hub; download the model first.",
        )
    file = folder / "config.json"
    if not file.exists():
        raise DestinationError(
            "Not a checkpoint: the folder has no config.json.",
            where=str(folder),
            expected=_CONTENT,
            got=listing(folder),
            hint=f"{_SAVE}.",
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DestinationError("The configuration cannot be read.", where=str(file), got=error) from error
    return config if isinstance(config, dict) else {}


def _load_model(folder: Path, classes: Sequence[Any]) -> Any:
    """The model of a checkpoint, of the first class that is for models of this type."""
    if not any(folder.glob("*.safetensors")):
        raise DestinationError(
            "The checkpoint has no weights.",
            where=str(folder),
            expected="*.safetensors",
            got=listing(folder),
            hint=f"{_SAVE}, even if the model was loaded from *.bin files.",
        )
    for number, model_class in enumerate(classes, 1):
        try:
            model, found = model_class.from_pretrained(
                folder,
                local_files_only=True,
                dtype=torch.float32,
                use_safetensors=True,  # never a pickle (*.bin), which can run code when it is read
                ignore_mismatched_sizes=True,  # _check_weights reports them, with their sizes
                output_loading_info=True,
            )
        except Exception as error:
            if number < len(classes) and "Unrecognized configuration class" in str(error):
                continue
            raise DestinationError(
                f"The checkpoint cannot be loaded as {model_class.__name__}.",
                where=str(folder),
                got=described(error, 300),
                hint="config.json and the weights must come from the same model, and no file may be truncated.",
            ) from error
        break
    _check_weights(folder, type(model), found)
    return model.eval()


def _check_weights(folder: Path, model_class: Any, found: Mapping[str, Any]) -> None:
    """Raises DestinationError if parameters are not in the files; transformers would leave them random."""
    missing = [(name, "nothing") for name in sorted(found["missing_keys"])]
    other = [(name, f"{tuple(stored)} instead of {tuple(wanted)}") for name, stored, wanted in found["mismatched_keys"]]
    wrong = [f"{name}: {got}" for name, got in other + missing]
    if wrong:
        raise DestinationError(
            f"The checkpoint lacks {len(wrong)} weights of {model_class.__name__}.",
            where=str(folder),
            expected=f"every weight of {model_class.__name__} with the sizes in config.json",
            got=", ".join(wrong[:3] + ["..."] * (len(wrong) > 3)),
            hint="a shard may be missing, or config.json belongs to a different model than the weights.",
        )


def _load_tokenizer(folder: Path) -> Any:
    """The tokenizer saved with the model, or None."""
    from transformers import AutoTokenizer

    if not any(folder.glob("tokenizer*")):
        return None
    with contextlib.suppress(Exception):  # some need packages that are not installed; the tokens are random then
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return None


# Runs of a checkpoint on the user's own data
#
# The data are files of these kinds:
#
# - ``.txt``: a text or prompt in each line;
# - an image, such as ``.png`` or ``.jpg``;
# - audio, such as ``.wav`` or ``.flac``, which is converted to the sampling rate of the checkpoint's processor;
# - ``.jsonl``: in each line, the arguments of the checkpoint's processor, such as ``{"text": "<image> What is it?",
#   "images": "cat.png"}``; paths of images and audio are relative to the file;
# - ``.safetensors``: the tensors of one call of ``forward``, by name, which nothing prepares any more.


_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_AUDIO = (".wav", ".flac", ".ogg", ".mp3")
_KINDS = f".txt, .jsonl, .safetensors, an image ({', '.join(_IMAGES)}) or audio ({', '.join(_AUDIO)})"
_PREPARING = ("tokenizer*", "vocab*", "*processor_config.json")  # files of tokenizers and processors
_MOST_ITEMS = 3  # beside the batch of all of them

_Item = Mapping[str, Any]  # arguments of a processor
_Inputs = dict[str, torch.Tensor]


def data_run(model: Any, folder: Path, files: Sequence[Path]) -> ExampleRun:
    """Returns a model with a run on data: a batch of all items, and the first ones by themselves.

    A model that generates does so from each batch.

    Args:
        model: A transformers model.
        folder: Its checkpoint, with the files of its tokenizer or processor.
        files: The data.

    Raises:
        DestinationError: if a file cannot be read.
        InvalidRequestError: if a file is of a different kind, if the processor does not take what it holds, or if the
            model does not take its tensors.
    """
    for file in files:
        if not file.is_file():
            raise DestinationError("The data file does not exist.", where=str(file), got=listing(file))
        if file.suffix.lower() not in (".txt", ".jsonl", ".safetensors", *_IMAGES, *_AUDIO):
            raise InvalidRequestError("Unsupported kind of data file.", where=str(file), expected=_KINDS)
    are_tensors = [file.suffix.lower() == ".safetensors" for file in files]
    processor = None if all(are_tensors) else _processor(model, folder)
    items, calls = list[_Item](), list[_Inputs]()
    for file, holds_tensors in zip(files, are_tensors, strict=True):
        try:
            if holds_tensors:
                calls.append(_tensors(file))
            else:
                items += _items(file, processor)
        except InvalidRequestError:
            raise
        except Exception as error:
            got = described(error, 200)
            raise DestinationError("The data cannot be read.", where=str(file), expected=_KINDS, got=got) from error
    calls += _batches(processor, items) if items else []
    if not calls:
        raise InvalidRequestError("The data contain nothing to run the model on.", where=", ".join(map(str, files)))
    calls = [_accepted(model, call, is_own=number < are_tensors.count(True)) for number, call in enumerate(calls)]
    if model.can_generate():
        count = sum(len(next(iter(call.values()))) for call in calls)
        return generation(model, calls, f"{len(calls)} batches of the data, {count} prompts")
    return forward_calls(model, calls)


def _accepted(model: Any, call: _Inputs, is_own: bool) -> _Inputs:
    """The tensors of a call that the model takes; processors also make others, but a user's own have to be right."""
    parameters = inspect.signature(model.forward).parameters
    unknown = [name for name in call if name not in parameters]
    takes_any = is_own and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not call or (unknown and not takes_any and (is_own or len(unknown) == len(call))):
        raise InvalidRequestError(
            "The data contain tensors that the model does not accept.",
            where=f"{type(model).__name__}.forward",
            expected=", ".join(parameters),
            got=", ".join(unknown) or "no tensors",
        )
    return {name: value for name, value in call.items() if takes_any or name in parameters}


def _items(file: Path, processor: Any) -> Iterator[_Item]:
    """Yields the arguments of a processor for each item of a file."""
    if file.suffix.lower() == ".txt":
        for line in file.read_text("utf-8").splitlines():
            if line.strip():
                yield {"text": line}
    elif file.suffix.lower() == ".jsonl":
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
            item = json.loads(line) if line.strip() else None
            if isinstance(item, dict):
                yield {n: value if n == "text" else _opened(value, file.parent, processor) for n, value in item.items()}
            elif item is not None:
                raise ValueError(f"line {number} is not a JSON object")
    else:
        yield {"images" if file.suffix.lower() in _IMAGES else "audio": _opened(file.name, file.parent, processor)}


def _opened(value: Any, folder: Path, processor: Any) -> Any:
    """A value of an item, with images and sounds themselves in place of their paths."""
    if isinstance(value, list):
        return [_opened(part, folder, processor) for part in value]
    kind = Path(value).suffix.lower() if isinstance(value, str) else None
    if kind in _IMAGES:
        from PIL import Image

        return Image.open(folder / value).convert("RGB")
    if kind in _AUDIO:
        from transformers.audio_utils import load_audio

        return load_audio(str(folder / value), sampling_rate=_sampling_rate(processor))
    return value


def _sampling_rate(processor: Any) -> int:
    """The sampling rate of the sounds that a processor takes, in Hz."""
    rate = getattr(getattr(processor, "feature_extractor", processor), "sampling_rate", None)
    if rate is None:
        raise InvalidRequestError(
            "The processor of the checkpoint does not accept audio.",
            where=type(processor).__name__,
            expected=_parameters(processor),
        )
    return int(rate)


def _parameters(processor: Any) -> str:
    return ", ".join(inspect.signature(processor.__call__).parameters)


def _tensors(file: Path) -> _Inputs:
    from safetensors.torch import load_file

    return load_file(file)


def _batches(processor: Any, items: Sequence[_Item]) -> list[_Inputs]:
    """The inputs for all items together, and for the first ones by themselves; a single item is also given twice."""
    alone = [_processed(processor, [item]) for item in items[:_MOST_ITEMS]]
    try:
        together = _processed(processor, items if len(items) > 1 else [*items, *items])
    except InvalidRequestError:  # texts of different lengths without a padding token, images of different sizes
        return alone
    return [together, *(alone if len(items) == 1 else alone[:-1] or alone)]


def _processor(model: Any, folder: Path) -> Any:
    processor = _loaded_processor(folder)
    tokenizer = getattr(processor, "tokenizer", processor)
    if model.can_generate() and not model.config.is_encoder_decoder and hasattr(tokenizer, "padding_side"):
        tokenizer.padding_side = "left"  # new tokens come directly after the prompt
    return processor


def _loaded_processor(folder: Path) -> Any:
    """The processor of a checkpoint, or the part of it that was saved: a checkpoint may lack the tokenizer."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoProcessor, AutoTokenizer

    errors = list[Exception]()
    # Without any file, transformers would make a tokenizer without a vocabulary.
    saved = any(file for pattern in _PREPARING for file in folder.glob(pattern))
    for kind in (AutoProcessor, AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer) if saved else ():
        try:
            return kind.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            errors.append(error)
    raise DestinationError(
        "The checkpoint has no tokenizer and no processor that can be loaded, so data cannot be prepared.",
        where=str(folder),
        got=described(errors[0], 200) if errors else listing(folder),
        hint="processor.save_pretrained(folder) writes one; or give tensors: a file that ends in .safetensors.",
    )


def _processed(processor: Any, items: Sequence[_Item]) -> _Inputs:
    names = dict.fromkeys(name for item in items for name in item)
    try:
        given = {name: [item[name] for item in items] for name in names}
        if "audio" in given:
            return _with_audio(processor, given)
        padding = {"padding": True} if "text" in given and len(items) > 1 else {}
        return dict(processor(**given, **padding, return_tensors="pt"))
    except Exception as error:
        raise InvalidRequestError(
            "The processor of the checkpoint does not accept the data.",
            where=type(processor).__name__,
            expected=_parameters(processor),
            got=f"{', '.join(names)}: {described(error, 200)}",
        ) from error


def _with_audio(processor: Any, given: dict[str, list[Any]]) -> _Inputs:
    """The inputs for several sounds, padded as the processor does by default, or else to the length of the longest."""
    from transformers import FeatureExtractionMixin

    options = {"sampling_rate": _sampling_rate(processor), "return_tensors": "pt"}
    # The first parameter of feature extractors has another name in each class.
    sounds = [given.pop("audio")] if isinstance(processor, FeatureExtractionMixin) else []
    if "text" not in given:
        with contextlib.suppress(ValueError):  # the default of some is not to pad
            return dict(processor(*sounds, **given, **options))
    return dict(processor(*sounds, **given, **options, padding=True))
