"""Faults to find: what is changed in a model, in which module, drawn from a seed; and pairs of runs without a fault."""

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from exportkit import trace_model
from tests import models

KINDS = ("llama", "t5", "bert", "cnn")


class Block(nn.Module):
    """Two convolutions and a way around them; the activation is one module, called twice, and works in place."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.act = nn.ReLU(inplace=True)
        around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.around = around if stride != 1 or inputs != outputs else nn.Identity()

    def forward(self, x):
        return self.act(self.norm2(self.conv2(self.act(self.norm1(self.conv1(x))))) + self.around(x))


class Convolutions(nn.Module):
    """A small residual network; `shift` moves the image by as many pixels."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.pool = nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.MaxPool2d(2)
        self.stages = nn.Sequential(Block(8, 8), Block(8, 16, 2), Block(16, 16))
        self.head, self.shift = nn.Linear(16, 10), 1

    def forward(self, x):
        x = self.pool(torch.relu(self.norm(self.stem(torch.roll(x, self.shift, -1)))))
        return self.head(self.stages(x).mean((2, 3)))


def made(kind: str, attention: str | None = None) -> nn.Module:
    """Returns a model whose norms and biases are no ones and zeros, as those of a trained one; always the same."""
    torch.manual_seed(0)
    builders: Mapping[str, Callable[[], nn.Module]] = {
        "llama": models.tiny_llama,
        "t5": models.tiny_t5,
        "bert": models.tiny_bert,
        "cnn": Convolutions,
    }
    model = builders[kind]().eval()
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.weight.data.uniform_(0.5, 1.5)
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            module.bias.data.normal_(std=0.1)
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.3)
            module.running_var.uniform_(0.5, 2)
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


def inputs(kind: str, seed: int, padded: bool = False) -> dict[str, Any]:
    """Returns arguments for a model, by name."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "cnn":
        return {"x": torch.randn(2, 3, 16, 16, generator=generator)}
    ids = torch.randint(3, models.VOCABULARY, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, : 3 * padded] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if kind == "t5":
        given["decoder_input_ids"] = torch.randint(3, models.VOCABULARY, (2, 5), generator=generator)
    return given


def traced(model: nn.Module, given: Mapping[str, Any], values: str | None = "all") -> Any:
    """Returns the trace of one call."""
    with torch.no_grad(), trace_model(model, values=values) as trace:
        model(**given)
    return trace


@dataclass(frozen=True)
class Fault:
    """A model that is changed in one module.

    Attributes:
        name: What is changed.
        kind: Which model.
        path: The module.
        model: The changed model.
        seed: Of its inputs.
        padded: Whether these are padded.
    """

    name: str
    kind: str
    path: str
    model: nn.Module
    seed: int
    padded: bool

    def is_named(self, path: str | None) -> bool:
        """Returns whether that is the path of the module, or of one that it shares its weight with."""
        modules = dict(self.model.named_modules(remove_duplicate=False))
        changed, named = modules[self.path], modules.get(path if path is not None else "no module")
        shared = _weighted(changed) and getattr(named, "weight", None) is changed.weight
        return named is changed or shared

    def has_effect(self) -> bool:
        """Returns whether the model still runs, and returns something else: a weight may meet nothing but zeros."""
        given = inputs(self.kind, self.seed, self.padded)
        with torch.no_grad():
            try:
                results = [model(**given) for model in (made(self.kind), self.model)]
            except RuntimeError:  # types that do not fit: torch itself names the place
                return False
        tensors = [result if isinstance(result, torch.Tensor) else result["logits"] for result in results]
        return not torch.equal(*tensors)


def faults(seed: int, count: int) -> list[Fault]:
    """Returns different faults, each kind of them in each model that has a module for it."""
    rng = random.Random(seed)
    found: list[Fault] = []
    turns = [(kind, name) for name in _FAULTS for kind in KINDS]
    for turn in range(100 * count):
        kind, name = turns[turn % len(turns)]
        model = made(kind)
        called = {call.path for call in traced(model, inputs(kind, 0), None).calls}
        fits, change = _FAULTS[name]
        paths = [path for path, module in model.named_modules() if path in called and fits(module)]
        if paths:
            path = rng.choice(paths)
            change(model.get_submodule(path), rng)
            fault = Fault(name, kind, path, model, rng.randrange(1000), kind != "cnn" and rng.random() < 0.3)
            if fault.has_effect() and not any((f.name, f.kind, f.path) == (name, kind, path) for f in found):
                found.append(fault)
        if len(found) == count:
            return found
    raise AssertionError("not so many different faults")


def _weighted(module: nn.Module) -> bool:
    return isinstance(getattr(module, "weight", None), nn.Parameter)


def _linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Conv2d)


def _heads(module: nn.Module) -> bool:
    """A projection to or from the two or four heads of these models."""
    return isinstance(module, nn.Linear) and set(module.weight.shape) <= {8, 16}


def _scale(module, rng):
    module.weight.data.mul_(rng.choice([0.5, 0.9, 1.02, 1.1]))


def _permute(module, rng):
    order = list(range(len(module.weight)))
    while order == sorted(order):
        rng.shuffle(order)
    module.weight.data = module.weight.data[order]


def _swap_heads(module, rng):
    heads = module.weight.data.reshape(2, -1, module.weight.shape[1])
    module.weight.data = heads.flip(0).reshape(module.weight.shape)


def _change_element(module, rng):
    flat = module.weight.data.view(-1)
    used = range(3, len(flat))
    flat[rng.choice(used) if not isinstance(module, nn.Embedding) else slice(None, None, 7)] += 0.2


def _zero_row(module, rng):
    rows = [row for row in range(len(module.weight)) if not isinstance(module, nn.Embedding) or row >= 3]
    module.weight.data[rng.choice(rows) if not isinstance(module, nn.Embedding) else rows[::2]] = 0


def _round_weights(module, rng):
    module.weight.data = module.weight.data.to(torch.bfloat16).to(torch.float32)


def _run_lower(module, rng):
    whole = module.forward
    module.to(torch.bfloat16)
    module.forward = lambda x: whole(x.to(torch.bfloat16)).to(torch.float32)


def _return_lower(module, rng):
    whole = module.forward
    module.forward = lambda *args, **kwargs: whole(*args, **kwargs).to(torch.float16)


def _shift_bias(module, rng):
    module.bias.data += 0.05


def _set_eps(module, rng):
    name = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"
    setattr(module, name, rng.choice([1e-4, 1e-3, 1e-2]))


def _set_scaling(module, rng):
    module.scaling = module.scaling * rng.choice([0.5, 2.0])


def _set_int(module, rng):
    if isinstance(module, Convolutions):
        module.shift = rng.choice([0, 2, 3])
    elif hasattr(module, "relative_attention_num_buckets"):
        module.relative_attention_max_distance, module.relative_attention_num_buckets = 6, 12
    else:
        module.position_ids[0, rng.randrange(9)] += 1


def _set_frequency(module, rng):
    module.inv_freq[rng.randrange(len(module.inv_freq))] *= 1.5


_FAULTS: dict[str, tuple[Callable[[nn.Module], bool], Callable[[nn.Module, random.Random], None]]] = {
    "weights scaled": (_weighted, _scale),
    "channels permuted": (_weighted, _permute),
    "heads swapped": (_heads, _swap_heads),
    "one element": (_weighted, _change_element),
    "rows zeroed": (_weighted, _zero_row),
    "weights rounded": (_linear, _round_weights),
    "wrong type inside": (_linear, _run_lower),
    "wrong type outside": (_linear, _return_lower),
    "bias shifted": (lambda module: isinstance(getattr(module, "bias", None), nn.Parameter), _shift_bias),
    "wrong eps": (lambda module: "Norm" in type(module).__name__, _set_eps),
    "wrong scaling": (lambda module: hasattr(module, "scaling"), _set_scaling),
    "one int": (
        lambda module: (
            isinstance(module, Convolutions)
            or hasattr(module, "position_ids")
            or getattr(module, "has_relative_attention_bias", False)
        ),
        _set_int,
    ),
    "one frequency": (lambda module: hasattr(module, "inv_freq"), _set_frequency),
}


def sound_pairs() -> dict[str, tuple[str, nn.Module, nn.Module, bool, torch.dtype]]:
    """Returns pairs of models without a fault, by what is different about the second.

    Each is the kind, both models, whether the inputs are padded, and the element type of the second's inputs.
    """
    pairs: dict[str, tuple[str, nn.Module, nn.Module, bool, torch.dtype]] = {}
    for kind in KINDS:
        model = made(kind)
        for padded in (False, True) if kind != "cnn" else (False,):
            text = f"{kind}, padded" if padded else kind
            for dtype in (torch.bfloat16, torch.float16, torch.float64):
                pairs[f"{text}, {dtype}"] = kind, model, copy.deepcopy(model).to(dtype), padded, dtype
            if kind != "cnn":
                pairs[f"{text}, eager attention"] = kind, model, made(kind, "eager"), padded, torch.float32
        pairs[f"{kind}, the same"] = kind, model, made(kind), False, torch.float32
    return pairs
