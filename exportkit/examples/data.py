"""Runs a local checkpoint on the user's own data.

The data are files of these kinds:

- ``.txt``: a text or prompt in each line;
- an image, such as ``.png`` or ``.jpg``;
- ``.jsonl``: in each line, the arguments of the checkpoint's processor, such as ``{"text": "<image> What is it?",
  "images": "cat.png"}``; paths of images are relative to the file;
- ``.safetensors``: the tensors of one call of ``forward``, by name, which nothing prepares any more.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from exportkit.errors import DestinationError, InvalidRequestError
from exportkit.examples.run import ExampleRun, forward_calls, generation
from exportkit.files import listing

_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_KINDS = f".txt, .jsonl, .safetensors, or an image ({', '.join(_IMAGES)})"
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
        InvalidRequestError: if a file is of another kind, or if the processor does not take what it holds.
    """
    items, calls = list[_Item](), list[_Inputs]()
    for file in files:
        if not file.is_file():
            raise DestinationError("The data file does not exist.", where=str(file), got=listing(file))
        try:
            if file.suffix == ".safetensors":
                calls.append(_tensors(file))
            else:
                items += _items(file)
        except InvalidRequestError:
            raise
        except Exception as error:
            got = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise DestinationError("The data cannot be read.", where=str(file), expected=_KINDS, got=got) from error
    calls += _batches(model, folder, items) if items else []
    if not calls:
        raise InvalidRequestError("The data hold nothing to run the model on.", where=", ".join(map(str, files)))
    parameters = inspect.signature(model.forward).parameters
    calls = [{name: value for name, value in call.items() if name in parameters} for call in calls]
    if model.can_generate():
        count = sum(len(next(iter(call.values()))) for call in calls)
        return generation(model, calls, f"{len(calls)} batches of the data, {count} prompts")
    return forward_calls(model, calls)


def _items(file: Path) -> Iterator[_Item]:
    """Yields the arguments of a processor for each item of a file."""
    if file.suffix == ".txt":
        for line in file.read_text("utf-8").splitlines():
            if line.strip():
                yield {"text": line}
    elif file.suffix == ".jsonl":
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
            item = json.loads(line) if line.strip() else None
            if isinstance(item, dict):
                yield {n: value if n == "text" else _opened(value, file.parent) for n, value in item.items()}
            elif item is not None:
                raise ValueError(f"line {number} is not a JSON object")
    elif file.suffix.lower() in _IMAGES:
        yield {"images": _opened(file.name, file.parent)}
    else:
        raise InvalidRequestError("Files of this kind hold no data for a model.", where=str(file), expected=_KINDS)


def _opened(value: Any, folder: Path) -> Any:
    """A value of an item, with the images themselves in place of their paths."""
    if isinstance(value, list):
        return [_opened(part, folder) for part in value]
    if isinstance(value, str) and Path(value).suffix.lower() in _IMAGES:
        from PIL import Image

        return Image.open(folder / value).convert("RGB")
    return value


def _tensors(file: Path) -> _Inputs:
    from safetensors.torch import load_file

    return load_file(file)


def _batches(model: Any, folder: Path, items: Sequence[_Item]) -> list[_Inputs]:
    """The inputs for all items together, and for the first ones by themselves; a single item is also given twice."""
    processor = _processor(model, folder)
    alone = [_processed(processor, [item]) for item in items[:_MOST_ITEMS]]
    try:
        together = _processed(processor, items if len(items) > 1 else [*items, *items])
    except InvalidRequestError:  # texts of different lengths without a padding token, images of different sizes
        return alone
    return [together, *(alone if len(items) == 1 else alone[:-1] or alone)]


def _processor(model: Any, folder: Path) -> Any:
    from transformers import AutoProcessor

    try:
        if not any(file for pattern in _PREPARING for file in folder.glob(pattern)):
            raise FileNotFoundError(", ".join(_PREPARING))  # transformers would make a tokenizer without a vocabulary
        processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise DestinationError(
            "The checkpoint has no tokenizer and no processor that can be loaded, so data cannot be prepared.",
            where=str(folder),
            got=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            hint="processor.save_pretrained(folder) writes one; or give tensors: a file that ends in .safetensors.",
        ) from error
    tokenizer = getattr(processor, "tokenizer", processor)
    if model.can_generate() and not model.config.is_encoder_decoder and hasattr(tokenizer, "padding_side"):
        tokenizer.padding_side = "left"  # new tokens come directly after the prompt
    return processor


def _processed(processor: Any, items: Sequence[_Item]) -> _Inputs:
    names = dict.fromkeys(name for item in items for name in item)
    try:
        given = {name: [item[name] for item in items] for name in names}
        padding = {"padding": True} if "text" in given and len(items) > 1 else {}
        return dict(processor(**given, **padding, return_tensors="pt"))
    except Exception as error:
        raise InvalidRequestError(
            "The processor of the checkpoint does not take the data.",
            where=type(processor).__name__,
            expected=", ".join(inspect.signature(processor.__call__).parameters),
            got=f"{', '.join(names)}: {type(error).__name__}: {' '.join(str(error).split())[:200]}",
        ) from error
