"""Loads a local checkpoint of transformers, with a run of its model.

Anything wrong with the folder is reported before the model runs: a missing file, an architecture that transformers does
not have, weights that would stay random.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from exportkit.errors import DestinationError, InvalidRequestError, described
from exportkit.examples.data import data_run
from exportkit.examples.run import OWN_CALLS, ExampleRun, default_run
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
        data: Files that the model runs on; see `exportkit.examples.data`. By default, the run is the usual one for the
            kind of model.
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
