"""One invocation of a model's method: the arguments by path, and what came back.

A recorded call, a call built at chosen sizes, and a call that was never made are all a `Call`. Its arguments are bound
to the parameters of the method, and unbound again, by the `Signature`, and nowhere else.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from exportkit.calls.signature import Signature
from exportkit.errors import InvalidTypeError
from exportkit.trees import Tree, cloned, flatten, join, joined, set_stored_length

NOTHING = flatten(None)  # the outputs of a call that was not made


@dataclass(frozen=True)
class Call:
    """One call of a method, made or not.

    Attributes:
        arguments: Its arguments by parameter, in signature order. In a recorded call, tensors are snapshots taken
            before the call.
        signature: Parameters of the method.
        named: Parameters that the caller gave by name; the others were given by position.
        outputs: What the method returned, as it was right after the call; `NOTHING` if the call was not made.
        index: Number of a recorded call among the stored ones, in the order in which they began; otherwise None.
        latency: Duration of the method itself in seconds; NaN if the call was not made.
        cached_tokens: Number of tokens that the counters of its caches are set to; None leaves them as recorded.
        label: What the call stands for, such as "one token".
        sizes: Sizes of the plan's variables, if the call was built for such sizes.
        error: Why there are no outputs, if building or making the call failed.
        gradients: Whether torch recorded gradients in a recorded call, or those that the call is made of.
        autocast: The types of devices for which ``torch.autocast`` was on then, each with its dtype in half precision.
        seed: If the method draws random numbers of torch, the seed of those that it gets where results are compared.
    """

    arguments: Mapping[str, Tree]
    signature: Signature
    named: frozenset[str] = frozenset()
    outputs: Tree = NOTHING
    index: int | None = None
    latency: float = math.nan
    cached_tokens: int | None = None
    label: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    error: str = ""
    gradients: bool = False
    autocast: tuple[tuple[str, str], ...] = ()
    seed: int | None = None

    @property
    def is_made(self) -> bool:
        """Whether the call was made, so that it has outputs."""
        return self.outputs is not NOTHING

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the input tensors by full path, such as ``past_key_values.layers[0].keys``."""
        return dict(self._tensors)

    @functools.cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return tensors_in(self.arguments)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the input tensors by full path."""
        return shapes_in(self.arguments)

    def constants(self) -> dict[str, Any]:
        """Returns the inputs that are not tensors by full path, ``None`` included."""
        return {join(name, p): c for name, tree in self.arguments.items() for p, c in tree.constants().items()}

    def generators(self) -> list[torch.Generator]:
        """Returns the random number generators among the inputs."""
        return [value for value in self.constants().values() if isinstance(value, torch.Generator)]

    def has(self, name: str) -> bool:
        """Returns whether the argument has a leaf other than None."""
        return name in self.arguments and any(leaf is not None for leaf in self.arguments[name].leaves)

    def values(self) -> dict[str, Any]:
        """Returns the nested values by parameter: new containers and caches that hold the tensors themselves."""
        return self._built(self.arguments)

    def copies(self) -> dict[str, Any]:
        """Returns the nested values by parameter, with copies of the tensors, so that a model may write to them."""
        return self._built({name: tree.map(cloned) for name, tree in self.arguments.items()})

    def args_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns ``args, kwargs`` to call the method with: copies, given by name wherever the method allows it."""
        return self.signature.unbind(self.copies())

    def args_kwargs_as_given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the same, with arguments given by position or by name as the caller of a recorded call gave them."""
        return self.args_kwargs() if self.index is None else self.signature.unbind(self.copies(), self.named)

    def with_tensors(self, tensors: Mapping[str, torch.Tensor | None]) -> Call:
        """Returns a call, not made yet, with other tensors.

        Args:
            tensors: The tensors that change, by full path; None takes one out.
        """
        arguments = {}
        for name, tree in self.arguments.items():
            changed = {}
            for path in tree.tensor_paths:
                full = join(name, path)
                if full in tensors:
                    changed[path] = tensors[full]
            arguments[name] = tree.with_leaves(changed) if changed else tree
        return self.with_arguments(arguments)

    def without(self, names: Set[str]) -> Call:
        """Returns the same call without the arguments of these names, those in ``**kwargs`` included."""
        kept = {name: tree for name, tree in self.arguments.items() if name not in names}
        catch_all, caught = self.signature.var_keyword, self._caught()
        if catch_all is not None and not names.isdisjoint(caught):
            del kept[catch_all]
            if left := {name: value for name, value in caught.items() if name not in names}:
                kept[catch_all] = flatten(left)
        return replace(self, arguments=kept)

    def names(self) -> set[str]:
        """Returns the names of the inputs that the call gives, those in ``**kwargs`` included."""
        return {*self.arguments, *self._caught()} - {str(self.signature.var_keyword)}

    def _caught(self) -> dict[str, Any]:
        tree = self.arguments.get(str(self.signature.var_keyword))
        return {} if tree is None else dict(tree.build())

    def with_arguments(self, arguments: Mapping[str, Tree]) -> Call:
        """Returns a call, not made yet, with other arguments."""
        return replace(self, arguments=arguments, outputs=NOTHING, index=None, latency=math.nan)

    def _built(self, trees: Mapping[str, Tree]) -> dict[str, Any]:
        values = {name: tree.build() for name, tree in trees.items()}
        if self.cached_tokens is not None:
            for value in values.values():
                set_stored_length(value, self.cached_tokens)
        return values


def given_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments by position and by name.

    Args:
        inputs: A tuple or list of positional ones, a mapping of named ones, a pair of both, or a single tensor.

    Raises:
        InvalidTypeError: for anything else.
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if not isinstance(inputs, tuple | list):
        raise InvalidTypeError(
            "Not arguments of a model.", expected="a tuple, a mapping, or a tensor", got=type(inputs).__name__
        )
    is_pair = len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict)
    return (inputs[0], dict(inputs[1])) if is_pair else (tuple(inputs), {})


def tensors_in(arguments: Mapping[str, Tree]) -> dict[str, torch.Tensor]:
    """Returns the tensors among arguments by full path."""
    found: dict[str, torch.Tensor] = {}
    for name, tree in arguments.items():
        found |= zip(joined(name, tree.tensor_paths), tree.tensors().values(), strict=True)
    return found


def shapes_in(arguments: Mapping[str, Tree]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors among arguments by full path."""
    found: dict[str, tuple[int, ...]] = {}
    for name, tree in arguments.items():
        found |= zip(joined(name, tree.tensor_paths), tree.shapes(), strict=True)
    return found


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of tensors by path."""
    return {path: tuple(tensor.shape) for path, tensor in tensors.items()}


def shapes_text(values: Mapping[str, torch.Tensor | tuple[int, ...]]) -> str:
    """Returns the shapes of tensors as text for a message: ``x (2, 3), layers[0].keys and 23 alike (2, 4, 7, 8)``.

    Tensors of one shape whose names differ in numbers only are alike.

    Args:
        values: Tensors or shapes, by name.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, value in values.items():
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else value
        groups.setdefault((re.sub(r"\d+", "", name), shape), []).append(name)
    labels = [(name, f" and {len(others)} alike" if others else "", key[1]) for key, (name, *others) in groups.items()]
    return ", ".join(f"{name}{alike} {shape}" for name, alike, shape in labels)
