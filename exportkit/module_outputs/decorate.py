"""Decorators for ``forward``: ``output_<key>`` arguments for captured values, and defaults from the config.

The class declares what can be captured, as ``_can_record_outputs``: specs by key. A result keeps its type if values can
be added to it: dicts, the output classes of transformers, and dataclasses. A tensor or a tuple becomes a named tuple of
the outputs, followed by the captured values.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import warnings
from collections import namedtuple
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from exportkit._torch_compat.tracing import constant_in_trace
from exportkit._torch_compat.transformers import recordable_outputs
from exportkit.errors import CaptureError, InvalidRequestError, nearest_text
from exportkit.module_outputs.context import run_captured
from exportkit.module_outputs.record import (
    FIRST_INPUT_KEY,
    Match,
    OutputTarget,
    Selection,
    keys_of,
    matches_of,
    require_matches,
    targets_of,
)

_PREFIX = "output_"
# Keys that are also requested by the flag of another key, as in transformers.
_IMPLIED = {"cross_attentions": "attentions", "mask_decoder_attentions": "attentions"}
NAMES = ("use_cache", "vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio")
_STRATEGIES = ("default", "full")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_LAST_STATES = ("vision_hidden_states", "last_hidden_state")
_classes: dict[str, type] = {}


def capture_outputs(func: Callable[..., Any] | None = None, *, tie_last_hidden_states: bool = True) -> Any:
    """Returns a forward that adds the values requested by ``output_<key>`` arguments to its result, as tuples.

    The class of the module declares what can be captured, as ``_can_record_outputs``: specs by key, see `capture`. A
    key is requested by the argument ``output_<key>`` or, if the module has a config, by ``config.output_<key>``;
    ``output_attentions`` also requests ``cross_attentions`` and ``mask_decoder_attentions``. ``output_hidden_states``
    may be an index or a list of indices, also negative; the other values are None. Dicts, dataclasses and the output
    classes of transformers get an additional value for each key; a tensor or tuple becomes a named tuple with the keys
    at its end. ``return_dict=False`` makes the result a plain tuple.

    Args:
        func: The forward, if the decorator is used without arguments.
        tie_last_hidden_states: Whether ``last_hidden_state`` (or ``vision_hidden_states``) of the result replaces the
            last of ``hidden_states``. ``config.tie_last_hidden_states`` takes precedence if it exists.

    Raises:
        InvalidRequestError: raised by the call, if it requests a key that is not declared, or that no module matches.
        CaptureError: raised by the call, if a module has no such output.

    Example:
        >>> class Model(torch.nn.Sequential):
        ...     _can_record_outputs = {"hidden_states": torch.nn.Linear}
        ...
        ...     @capture_outputs
        ...     def forward(self, x):
        ...         return super().forward(x)
        >>> len(Model(torch.nn.Linear(2, 2))(torch.ones(1, 2), output_hidden_states=True).hidden_states)
        2
    """
    if func is None:
        return functools.partial(capture_outputs, tie_last_hidden_states=tie_last_hidden_states)
    parameters = Parameters(func)

    @functools.wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = getattr(self, "config", None)
        return_dict = kwargs.pop("return_dict", setting(config, "return_dict", True))
        targets = targets_of(recordable_outputs(self))
        requested = _requested(self, targets, args, kwargs, parameters)
        kwargs = {name: value for name, value in kwargs.items() if _is_passed_on(name, targets, parameters)}
        if requested:
            result = _captured(self, targets, requested, lambda: func(self, *args, **kwargs), tie_last_hidden_states)
        else:
            result = func(self, *args, **kwargs)
        return as_tuple(result) if return_dict is False else result

    wrapper.__signature__ = _with_any_name(inspect.signature(func))  # type: ignore[attr-defined]
    return wrapper


def _with_any_name(signature: inspect.Signature) -> inspect.Signature:
    """The signature with ``**kwargs``, because torch.export passes only arguments of the signature."""
    parameters = list(signature.parameters.values())
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return signature
    return signature.replace(parameters=[*parameters, inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)])


def _requested(
    module: Any, targets: list[OutputTarget], args: tuple[Any, ...], kwargs: Mapping[str, Any], parameters: Parameters
) -> dict[str, Any]:
    """What is requested: by key, True or the positions of its values."""
    keys = keys_of(targets)
    _refuse_undeclared(module, keys, kwargs, parameters)
    config = getattr(module, "config", None)
    requested = {}
    for key in keys:
        value = _flag(key, args, kwargs, parameters, config)
        if not _asks(key, value) and key in _IMPLIED:
            value = bool(_flag(_IMPLIED[key], args, kwargs, parameters, config))
        if _asks(key, value):
            requested[key] = value
    return requested


def _flag(key: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], parameters: Parameters, config: Any) -> Any:
    value = parameters.given(_PREFIX + key, args, kwargs)
    return setting(config, _PREFIX + key, False) if value is None else value


def _asks(key: str, value: Any) -> bool:
    """Whether a flag is set. Position 0 of the hidden states counts as set."""
    return bool(value) or (key == FIRST_INPUT_KEY and type(value) is int)


def _refuse_undeclared(module: Any, keys: list[str], kwargs: Mapping[str, Any], parameters: Parameters) -> None:
    for name, value in kwargs.items():
        key = name.removeprefix(_PREFIX)
        if value is not True or key == name or key in _flags_of(keys) or name in parameters.names:
            continue
        if parameters.takes_any_name and _declared_inside(module, key):
            continue
        raise InvalidRequestError(
            f"{type(module).__name__} cannot return {key!r}: it is not declared in `_can_record_outputs`.",
            expected=", ".join(_PREFIX + key for key in keys) or "no such argument",
            got=f"{name}=True",
            hint=f"nearest: {nearest_text(key, keys)}.",
        )


def _flags_of(keys: list[str]) -> set[str]:
    """The keys whose flags request some of these keys."""
    return {*keys, *(_IMPLIED[key] for key in keys if key in _IMPLIED)}


def _declared_inside(module: Any, key: str) -> bool:
    """Whether the argument may be meant for an inner module."""
    return any(key in recordable_outputs(inner) for inner in module.modules())


def _is_passed_on(name: str, targets: list[OutputTarget], parameters: Parameters) -> bool:
    """Whether the forward gets an argument: all except flags of this decorator that it has no parameter for."""
    return parameters.accepts(name) or name.removeprefix(_PREFIX) not in _flags_of(keys_of(targets))


def _captured(
    module: Any, targets: list[OutputTarget], requested: Mapping[str, Any], call: Callable[[], Any], tie: bool
) -> Any:
    wanted = [target for target in targets if target.key in requested]
    matches: list[Match] = matches_of(module, wanted)
    require_matches(module, [target for target in wanted if target.key not in _IMPLIED], matches)
    result, values = run_captured(module, matches, keys_of(wanted), call, _selections(requested))
    states = values.get(FIRST_INPUT_KEY)
    tie_in_config = setting(getattr(module, "config", None), "tie_last_hidden_states")
    if states and states[-1] is not None and (tie if tie_in_config is None else tie_in_config):
        last = last_hidden_state(result)
        values[FIRST_INPUT_KEY] = states if last is None else (*states[:-1], last)
    return with_values(result, values)


def _selections(requested: Mapping[str, Any]) -> dict[str, Selection]:
    value = requested.get(FIRST_INPUT_KEY)
    if value is None or isinstance(value, bool):
        return {}
    return {FIRST_INPUT_KEY: Selection([value] if isinstance(value, int) else value)}


def merge_with_config_defaults(func: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that reads arguments that are None or missing from ``self.config``.

    These are ``use_cache``, ``vision_feature_layer``, ``vision_feature_select_strategy`` and ``vision_aspect_ratio``.
    Arguments that a call passes, by position or by name, are kept. A module without a config runs as before. During
    training with gradient checkpointing, ``use_cache`` is False.

    Args:
        func: The forward.

    Raises:
        InvalidRequestError: raised by the call, if ``vision_feature_select_strategy`` is neither "default" nor "full".
    """
    parameters = Parameters(func)
    names = [name for name in NAMES if parameters.accepts(name)]

    @functools.wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = getattr(self, "config", None)
        for name in names:
            given = parameters.given(name, args, kwargs)
            value = _checked(self, name, setting(config, name) if given is None else given)
            if value is not given:
                args, kwargs = parameters.replaced(name, value, args, kwargs)
        return func(self, *args, **kwargs)

    return wrapper


def _checked(module: Any, name: str, value: Any) -> Any:
    if name == "use_cache" and value and module.training and getattr(module, "gradient_checkpointing", False):
        warnings.warn("A cache cannot be used with gradient checkpointing: use_cache is False.", stacklevel=3)
        return False
    if name == "vision_feature_select_strategy" and value is not None and value not in _STRATEGIES:
        raise InvalidRequestError(
            "The strategy for selecting vision features is unknown.",
            where=name,
            expected=" or ".join(_STRATEGIES),
            got=value,
        )
    return value


class Parameters:
    """The parameters of a method without ``self``; for a decorated method, those of the original."""

    def __init__(self, method: Callable[..., Any]) -> None:
        parameters = list(inspect.signature(inspect.unwrap(method)).parameters.values())[1:]
        self.names = frozenset(parameter.name for parameter in parameters)
        self.takes_any_name = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        self._positions = {
            parameter.name: position for position, parameter in enumerate(parameters) if parameter.kind in _POSITIONAL
        }

    def accepts(self, name: str) -> bool:
        """Returns whether the method accepts an argument with this name."""
        return name in self.names or self.takes_any_name

    def given(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns the value that a call passes, by position or by name, or None."""
        position = self._positions.get(name, len(args))
        return args[position] if position < len(args) else kwargs.get(name)

    def replaced(
        self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of a call with a different value for an argument that it passes."""
        position = self._positions.get(name, len(args))
        if position < len(args):
            return (*args[:position], value, *args[position + 1 :]), kwargs
        return args, {**kwargs, name: value}


def setting(config: Any, name: str, default: Any = None) -> Any:
    """Returns a setting of a config, which may be an object, a dict, or None."""
    if isinstance(config, Mapping):
        return config.get(name, default)
    return getattr(config, name, default)


def last_hidden_state(result: Any) -> Any:
    """Returns the last hidden state of a result, or None."""
    for name in _LAST_STATES:
        value = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
        if value is not None:
            return value
    return None


def with_values(result: Any, values: Mapping[str, tuple[Any, ...]]) -> Any:
    """Returns a result with values added under their keys.

    Raises:
        CaptureError: if values cannot be added to a result of this type.
    """
    if not values:
        return result
    if type(result) is dict:
        return {**result, **values}
    if isinstance(result, MutableMapping):
        for key, value in values.items():
            result[key] = value
        return result
    if isinstance(result, torch.Tensor):
        return _named({"output": result, **values})
    if isinstance(result, list | tuple):
        names = getattr(result, "_fields", None) or [f"output_{i}" for i in range(len(result))]
        return _named({**dict(zip(names, result, strict=True)), **values})
    if dataclasses.is_dataclass(result):
        return _dataclass(result, values)
    raise CaptureError(
        "The captured values cannot be added to what the model returns.",
        expected="a tensor, tuple, list, dict or dataclass",
        got=type(result).__name__,
        hint="use `with capture(model, ...)`, which leaves the result alone.",
    )


def as_tuple(result: Any) -> Any:
    """Returns the values of a result as a tuple, without the Nones of dicts and dataclasses; a tensor as it is."""
    if hasattr(result, "to_tuple"):
        return result.to_tuple()
    if isinstance(result, Mapping):
        return tuple(value for value in result.values() if value is not None)
    if isinstance(result, list | tuple):
        return tuple(result)
    if dataclasses.is_dataclass(result):
        names = [field.name for field in dataclasses.fields(result)]
        names += [name for name in getattr(result, "__dict__", {}) if name not in names]
        found = [getattr(result, name) for name in names]
        return tuple(value for value in found if value is not None)
    return result


def _dataclass(result: Any, values: Mapping[str, Any]) -> Any:
    """A copy, because the class may be frozen. Keys that are not fields become attributes of the copy."""
    fields = {field.name for field in dataclasses.fields(result) if field.init}
    result = dataclasses.replace(result, **{key: value for key, value in values.items() if key in fields})
    rest = {key: value for key, value in values.items() if key not in fields}
    if rest and not hasattr(result, "__dict__"):
        raise CaptureError(
            f"{type(result).__name__} has no field for {', '.join(map(repr, rest))}.",
            hint="add the field, with None as its default.",
        )
    result = copy.copy(result) if rest else result
    for key, value in rest.items():
        object.__setattr__(result, key, value)
    return result


def _named(values: Mapping[str, Any]) -> Any:
    _prepare_class(*values)
    return _classes[" ".join(values)](*values.values())


@constant_in_trace
def _prepare_class(*names: str) -> bool:
    """Creates the class of a result, which torch cannot trace."""
    key = " ".join(names)
    if key not in _classes:
        _classes[key] = namedtuple("CapturedOutput", names, rename=True)
    return True
