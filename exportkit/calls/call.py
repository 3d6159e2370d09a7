"""One invocation of a model's method: its arguments as leaves by path, and what came back.

A recorded call, a call built at chosen sizes, and a call that was never made are all a `Call`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from exportkit.calls.signature import Signature
from exportkit.trees import Tree, flatten, join, joined, set_stored_length

Value = TypeVar("Value")

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

    @property
    def is_made(self) -> bool:
        """Whether the call was made, so that it has outputs."""
        return self.outputs is not NOTHING

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the input tensors by full path, such as ``past_key_values.layers[0].keys``."""
        return dict(self._tensors)

    @functools.cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return self._by_path(lambda tree: tree.tensors().values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the input tensors by full path."""
        return self._by_path(Tree.shapes)

    def _by_path(self, values_of: Callable[[Tree], Iterable[Value]]) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for name, tree in self.arguments.items():
            found |= zip(joined(name, tree.tensor_paths), values_of(tree), strict=True)
        return found

    def constants(self) -> dict[str, Any]:
        """Returns the inputs that are not tensors by full path, ``None`` included."""
        return {join(name, p): c for name, tree in self.arguments.items() for p, c in tree.constants().items()}

    def has(self, name: str) -> bool:
        """Returns whether the argument has a leaf other than None."""
        return name in self.arguments and any(leaf is not None for leaf in self.arguments[name].leaves)

    def values(self) -> dict[str, Any]:
        """Returns the nested values by parameter: new containers and caches that hold the tensors themselves."""
        return self._built(self.arguments)

    def copies(self) -> dict[str, Any]:
        """Returns the nested values by parameter, with copies of the tensors, so that a model may write to them."""
        return self._built({name: tree.map(_copied) for name, tree in self.arguments.items()})

    def args_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns ``args, kwargs`` to call the method with: copies, given by name wherever the method allows it."""
        return self.signature.unbind(self.copies())

    def with_tensors(self, tensors: Mapping[str, torch.Tensor | None]) -> Call:
        """Returns a call, not made yet, with other tensors.

        Args:
            tensors: The tensors that change, by full path; None takes one out.
        """
        arguments = {
            name: tree.with_leaves({p: tensors[full] for p in tree.tensors() if (full := join(name, p)) in tensors})
            for name, tree in self.arguments.items()
        }
        return self.with_arguments(arguments)

    def with_arguments(self, arguments: Mapping[str, Tree]) -> Call:
        """Returns a call, not made yet, with other arguments."""
        return replace(self, arguments=arguments, outputs=NOTHING, index=None, latency=math.nan)

    def _built(self, trees: Mapping[str, Tree]) -> dict[str, Any]:
        values = {name: tree.build() for name, tree in trees.items()}
        if self.cached_tokens is not None:
            for value in values.values():
                set_stored_length(value, self.cached_tokens)
        return values


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
