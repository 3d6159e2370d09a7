"""Loads a local transformers checkpoint together with its default run.

Anything wrong with the folder is reported before the model runs: a missing file, an architecture that transformers does
not have, weights that would stay random.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from exportkit.errors import DestinationError, InvalidRequestError
from exportkit.examples.run import OWN_CALLS, ExampleRun, default_run

_CONTENT = "a folder with config.json and *.safetensors"
_SAVE = "model.save_pretrained(folder) writes such a folder"


def load_checkpoint(folder: str | os.PathLike[str]) -> ExampleRun:
    """Loads the model of a local checkpoint, with the default run for its task. Nothing is downloaded.

    The weights are loaded as float32 whatever their dtype in the files, because onnxruntime has float32 kernels on
    every machine.

    Args:
        folder: Folder with ``config.json``, ``*.safetensors`` and, if the model has a tokenizer, the tokenizer's files.

    Raises:
        DestinationError: if the folder, its configuration or its weights cannot be read.
        InvalidRequestError: if the architecture is unknown, or has no default run.
    """
    path = Path(folder)
    return default_run(_load_model(path, _model_class(path)), _load_tokenizer(path))


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
            "There is no such checkpoint folder.",
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


def listing(folder: Path) -> str:
    """Returns what is at a path, in a few words for an error message."""
    if not folder.is_dir():
        return "a file" if folder.exists() else "nothing"
    names = sorted(item.name for item in folder.iterdir())
    return ", ".join(names[:8] + ["..."] * (len(names) > 8)) or "an empty folder"


def _load_model(folder: Path, model_class: Any) -> Any:
    if not any(folder.glob("*.safetensors")):
        raise DestinationError(
            "The checkpoint has no weights.",
            where=str(folder),
            expected="*.safetensors",
            got=listing(folder),
            hint=f"{_SAVE}, even if the model was loaded from *.bin files.",
        )
    try:
        model, found = model_class.from_pretrained(
            folder,
            local_files_only=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # _check_weights reports them, with their sizes
            output_loading_info=True,
        )
    except Exception as error:
        raise DestinationError(
            f"The checkpoint cannot be loaded as {model_class.__name__}.",
            where=str(folder),
            got=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            hint="config.json and the weights must come from the same model, and no file may be truncated.",
        ) from error
    _check_weights(folder, model_class, found)
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
