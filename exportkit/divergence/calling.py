"""A call of a model in all its forms: in come a model and inputs, out go a trace, and what its graphs are fed.

A model writes into its caches, so each form gets tensors of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from exportkit.errors import InvalidRequestError, InvalidTypeError
from exportkit.module_traces.record import trace_model
from exportkit.module_traces.trace import Trace
from exportkit.module_traces.visible import Padding
from exportkit.trees import flatten


class Calling:
    """A call of a model.

    Args:
        model: The model.
        method: The method that is called.
        inputs: A tuple of positional arguments, a mapping of named ones, a pair of both, or a single tensor.
        exported: What knows how to feed the graphs of the model: ``feeds`` and ``program_feeds``; None if nothing does.
        constants: Python values that are part of the graph, by path: the model gets those that are not given.

    Raises:
        InvalidTypeError: if the inputs are nothing of that.
    """

    def __init__(
        self, model: torch.nn.Module, method: str, inputs: Any, exported: Any, constants: Mapping[str, Any]
    ) -> None:
        self.model, self._method, self._exported = model, method, exported
        self._args, self._kwargs = _arguments(inputs)
        self._constants = self._not_given(constants)

    def trace(self) -> tuple[Trace, Padding]:
        """Returns what the model does, with all values, and which positions of its tensors are padding."""
        args, kwargs = _copied(self._args), _copied(self._kwargs)
        visible = Padding.of_tensors(flatten((args, kwargs)).tensors().items())
        with torch.no_grad(), trace_model(self.model, values="all") as trace:
            getattr(self.model, self._method)(*args, **kwargs, **self._constants)
        return trace, visible

    def _not_given(self, constants: Mapping[str, Any]) -> dict[str, Any]:
        """The constants that the call does not give, by name of the argument."""
        if not constants:
            return {}
        signature = inspect.signature(getattr(self.model, self._method))
        given = signature.bind_partial(*self._args, **self._kwargs).arguments
        further = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
        named = {name: value for name, value in constants.items() if name in signature.parameters and name not in given}
        if further is not None:
            inside = {
                path.removeprefix(f"{further}."): value
                for path, value in constants.items()
                if path.startswith(f"{further}.")
            }
            named |= {name: value for name, value in inside.items() if name.isidentifier() and name not in self._kwargs}
        return named

    def program_inputs(self, program: torch.export.ExportedProgram) -> dict[str, Any]:
        """Returns what the program is fed, by name of the node that stands for each input.

        Args:
            program: The program.

        Raises:
            InvalidRequestError: if the inputs do not fit it.
        """
        from exportkit.divergence.program_run import program_inputs

        if hasattr(self._exported, "program_feeds"):
            known: dict[str, Any] = self._exported.program_feeds(*_copied(self._args), **_copied(self._kwargs))
            return known
        args, kwargs = self._bound(program)
        return program_inputs(program, args, kwargs)

    def _bound(self, program: torch.export.ExportedProgram) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as the program takes them: a program with named arguments alone takes all by name."""
        args, kwargs = _copied(self._args), _copied(self._kwargs)
        spec = program.call_spec.in_spec
        names = (spec.children()[1].context or []) if spec is not None else []
        if args and spec is not None and not spec.children()[0].num_children:
            bound = inspect.signature(getattr(self.model, self._method)).bind(*args, **kwargs).arguments
            return (), {name: bound[name] for name in names if name in bound}
        return args, {name: value for name, value in kwargs.items() if name in names}

    def feeds(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Returns what an ONNX model is fed, by name of its input.

        Args:
            names: Names of its inputs, in order.

        Raises:
            InvalidRequestError: if the inputs do not fit it.
        """
        if self._exported is not None:
            feeds: dict[str, torch.Tensor] = self._exported.feeds(*_copied(self._args), **_copied(self._kwargs))
            return feeds
        bound = inspect.signature(getattr(self.model, self._method)).bind(*self._args, **self._kwargs).arguments
        by_path = flatten(dict(bound)).tensors()
        if set(names) <= set(by_path):
            return {name: by_path[name] for name in names}
        if len(names) != len(by_path):
            raise InvalidRequestError(
                "The arguments do not fit the inputs of the ONNX model.",
                expected=", ".join(names),
                got=", ".join(by_path),
                hint="give a tensor for each input, in the same order or by the same names.",
            )
        return dict(zip(names, by_path.values(), strict=True))


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, tuple | list):
        if len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict):
            return inputs[0], dict(inputs[1])
        return tuple(inputs), {}
    raise InvalidTypeError(
        "These are no arguments of a model.", expected="a tuple, a mapping, or a tensor", got=type(inputs).__name__
    )


def _copied(value: Any) -> Any:
    """The value with tensors of its own: a model writes into its caches."""
    return flatten(value).map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf).build()
