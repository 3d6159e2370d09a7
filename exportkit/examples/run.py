"""Models with a run worth observing: `ExampleRun`, and the default run of a transformers model.

The default run depends on what the model declares: its main input, whether it generates, and the signature of its
``forward``. The name of the model does not matter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exportkit.api.observer import InputObserver
from exportkit.calls.parts import Wanted
from exportkit.errors import InvalidRequestError, ObservationError, described

_MOST_CALLS = 16  # with values; of further calls, shapes are enough
OWN_CALLS = (
    "observe calls of your own in Python: observer = exportkit.InputObserver(); "
    "run the model in `with observer(model):`; then exportkit.export(model, observer)."
)

_Inputs = dict[str, torch.Tensor]
_MAIN_INPUTS = {"input_ids", "pixel_values", "pixel_values_videos", "input_values", "input_features"}
_PROMPT = "The quick brown fox jumps over the lazy dog."
_TEXTS = [[_PROMPT, "It rains."], ["Two small cats sleep.", "It rains.", "No."], ["It rains."]]  # different lengths
_PROMPT_TOKENS, _NEW_TOKENS = 7, 4
_TEXT_SHAPES = [(2, 7), (3, 9), (1, 5)]  # (sentences, tokens)
_AUDIO_SHAPES = [(1, 8000), (2, 6401)]  # (clips, samples); the lengths have no common factor
_BATCHES = (1, 2)  # for inputs of a fixed size
_IMAGE_SIZE = 224  # if the configuration names none because the model takes any size


@dataclass(frozen=True)
class ExampleRun:
    """A model and a run of it that is worth observing.

    Attributes:
        name: What the model is, in a few words.
        description: What the run does, in a few words.
        model: The model, in evaluation mode.
        run: Runs the model.
        parts: Submodules that become graphs of their own; see `InputObserver`.
    """

    name: str
    description: str
    model: torch.nn.Module
    run: Callable[[], object]
    parts: Wanted | None = None

    def observe(self) -> InputObserver:
        """Runs the model and returns the observer that recorded the run.

        Raises:
            InvalidRequestError: if the model has no such parts.
        """
        observer = InputObserver()
        with observer(self.model, store_n_calls=_MOST_CALLS, parts=self.parts), torch.no_grad():
            self.run()
        return observer


def default_run(model: Any, tokenizer: Any) -> ExampleRun:
    """Returns a model with a run that is usual for its task.

    Decoders and encoder-decoders generate from one prompt. Encoders read padded batches of different lengths. Image
    and audio models get noise in two batch sizes.

    Args:
        model: A transformers model.
        tokenizer: Its tokenizer. Without one, the tokens are random.

    Raises:
        InvalidRequestError: if the model has no default run.
    """
    main, parameters = model.main_input_name, inspect.signature(model.forward).parameters
    others = sorted(_MAIN_INPUTS.intersection(parameters) - {main})
    if others:
        raise _no_default_run(model, f"one that takes {main} and {', '.join(others)}")
    if model.can_generate():
        if main != "input_ids":
            raise _no_default_run(model, f"one that generates from {main}")
        prompt = _prompt(model, tokenizer)
        return generation(model, [prompt], f"one prompt of {prompt['input_ids'].shape[1]} tokens")
    if main not in _CALLS:
        raise _no_default_run(model, f"one that takes {main}")
    calls = [
        {name: value for name, value in call.items() if name in parameters} for call in _CALLS[main](model, tokenizer)
    ]
    required = [n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    lacking = [name for name in required if name not in calls[0]]
    if lacking:
        raise _no_default_run(model, f"one that needs {', '.join(lacking)} as well")
    return forward_calls(model, calls)


def _no_default_run(model: Any, kind: str) -> InvalidRequestError:
    return InvalidRequestError(
        "There is no default run for this model.",
        where=type(model).__name__,
        expected="a model that takes only text, only images or only audio",
        got=kind,
        hint=OWN_CALLS,
    )


def _example(model: Any, description: str, run: Callable[[], object]) -> ExampleRun:
    """An example whose run raises `ObservationError` if the model raises."""

    def guarded() -> None:
        try:
            run()
        except Exception as error:
            raise ObservationError(
                "The model raises in the run that is observed.",
                where=f"{type(model).__name__}: {description}",
                got=described(error, 300),
                hint=OWN_CALLS,
            ) from error

    return ExampleRun(type(model).__name__, description, model, guarded)


def generation(model: Any, prompts: Sequence[_Inputs], what: str) -> ExampleRun:
    """Returns a model with a run that generates a few tokens from each prompt.

    Args:
        model: A transformers model.
        prompts: The arguments of ``generate``.
        what: What the prompts are, in a few words.
    """
    length = {"min_new_tokens": _NEW_TOKENS, "max_new_tokens": _NEW_TOKENS}
    options = {**length, "do_sample": False, "num_beams": 1}
    description = f"generate: {what}, {_NEW_TOKENS} new tokens"
    return _example(model, description, lambda: [model.generate(**prompt, **options) for prompt in prompts])


def forward_calls(model: Any, calls: Sequence[_Inputs]) -> ExampleRun:
    """Returns a model with a run that calls its ``forward``.

    Args:
        model: A transformers model.
        calls: The arguments of each call.
    """
    main = next(name for name in (model.main_input_name, *calls[0]) if name in calls[0])
    shapes = ", ".join("x".join(map(str, call[main].shape)) for call in calls)
    return _example(model, f"forward with {main} {shapes}", lambda: [model(**call) for call in calls])


def _prompt(model: Any, tokenizer: Any) -> _Inputs:
    """One prompt with a padding token: ``generate`` drops a mask of ones, and the graph would have no mask."""
    tokens = random_tokens(model, 1, _PROMPT_TOKENS)[0].tolist() if tokenizer is None else tokenizer(_PROMPT).input_ids
    ids, mask = torch.tensor([[_padding_token(model), *tokens]]), torch.tensor([[0] + [1] * len(tokens)])
    if model.config.is_encoder_decoder:  # encoders are padded on the right, decoders on the left
        ids, mask = ids.roll(-1), mask.roll(-1)
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        return {"input_ids": torch.tensor([tokens])}
    return {"input_ids": ids, "attention_mask": mask}


def _text_calls(model: Any, tokenizer: Any) -> list[_Inputs]:
    if tokenizer is not None and tokenizer.pad_token is not None:
        return [dict(tokenizer(texts, padding=True, return_tensors="pt")) for texts in _TEXTS]
    return [padded(model, *shape) for shape in _TEXT_SHAPES]


def padded(model: Any, batch: int, length: int) -> _Inputs:
    """Returns random tokens and their mask; the last sentence is two tokens shorter.

    Args:
        model: A transformers model.
        batch: Number of sentences.
        length: Number of tokens of the longest one.
    """
    ids, mask = random_tokens(model, batch, length), torch.ones(batch, length, dtype=torch.int64)
    ids[-1, -2:], mask[-1, -2:] = _padding_token(model), 0
    return {"input_ids": ids, "attention_mask": mask}


def random_tokens(model: Any, batch: int, length: int) -> torch.Tensor:
    """Returns random tokens without the first ones of the vocabulary, which are often special tokens.

    Args:
        model: A transformers model.
        batch: Number of sentences.
        length: Number of tokens.
    """
    size = model.config.get_text_config().vocab_size
    return torch.randint(min(3, size - 1), size, (batch, length), generator=torch.Generator().manual_seed(0))


def _padding_token(model: Any) -> int:
    return getattr(model.config.get_text_config(), "pad_token_id", None) or 0


def _image_calls(model: Any, _: Any) -> list[_Inputs]:
    size = getattr(model.config, "image_size", None) or _IMAGE_SIZE
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(model.config, "num_channels", 3)
    return [{"pixel_values": _noise(batch, channels, height, width)} for batch in _BATCHES]


def _audio_calls(model: Any, _: Any) -> list[_Inputs]:
    bins = getattr(model.config, "num_mel_bins", None)
    if bins is None:
        return [{"input_values": _noise(*shape)} for shape in _AUDIO_SHAPES]
    return [{"input_values": _noise(batch, model.config.max_length, bins)} for batch in _BATCHES]


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


_CALLS: Mapping[str, Callable[[Any, Any], list[_Inputs]]] = {
    "input_ids": _text_calls,
    "pixel_values": _image_calls,
    "input_values": _audio_calls,
}
