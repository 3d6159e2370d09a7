"""``output_<key>`` arguments for a module. In comes its forward; out comes one that also returns what is asked for.

What can be asked for is declared on the class, as ``_can_record_outputs``: specs by key.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from exportkit.errors import InvalidRequestError
from exportkit.module_outputs.arguments import Parameters, setting
from exportkit.module_outputs.record import Selection
from exportkit.module_outputs.results import as_tuple, last_hidden_state, with_values
from exportkit.module_outputs.run import run_captured
from exportkit.module_outputs.specs import (
    FIRST_INPUT_KEY,
    Match,
    Target,
    keys_of,
    matches_of,
    nearest,
    require_matches,
    targets_of,
)

_PREFIX = "output_"
_IMPLIED = {"cross_attentions": "attentions"}


def capture_outputs(func: Callable[..., Any] | None = None, *, tie_last_hidden_states: bool = True) -> Any:
    """Returns a forward that adds to its result what ``output_<key>`` arguments ask for, as tuples.

    The class of the module declares what there is, as ``_can_record_outputs``: specs by key, see `capture`. A key is
    asked for by the argument ``output_<key>``, or else by ``config.output_<key>`` if the module has a config;
    ``output_attentions`` asks for ``cross_attentions``, too. ``output_hidden_states`` may be a position or a list of
    them, also negative: the other values are None. Dicts, dataclasses and the output classes of transformers get a
    value more for each key; a tensor or tuple becomes a named tuple with the keys at its end. ``return_dict=False``
    makes it a plain tuple.

    Args:
        func: The forward, where the decorator is used without arguments.
        tie_last_hidden_states: Whether ``last_hidden_state`` (or ``vision_hidden_states``) of the result stands in for
            the last of ``hidden_states``. ``config.tie_last_hidden_states`` decides if there is one.

    Raises:
        InvalidRequestError: by the call, if it asks for a key that is not declared, or that no module matches.
        CaptureError: by the call, if a module has no such output.

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
        targets = targets_of(getattr(self, "_can_record_outputs", None) or {})
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
    """The signature with ``**kwargs``: torch.export passes only what a signature has."""
    parameters = list(signature.parameters.values())
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return signature
    return signature.replace(parameters=[*parameters, inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)])


def _requested(
    module: Any, targets: list[Target], args: tuple[Any, ...], kwargs: Mapping[str, Any], parameters: Parameters
) -> dict[str, Any]:
    """What is asked for: True, or which of its values, by key."""
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
    """Whether a flag is set. Position 0 of the hidden states is one."""
    return bool(value) or (key == FIRST_INPUT_KEY and type(value) is int)


def _refuse_undeclared(module: Any, keys: list[str], kwargs: Mapping[str, Any], parameters: Parameters) -> None:
    for name, value in kwargs.items():
        key = name.removeprefix(_PREFIX)
        if value is not True or key == name or key in keys or name in parameters.names:
            continue
        if parameters.takes_any_name and _declared_inside(module, key):
            continue
        raise InvalidRequestError(
            f"{type(module).__name__} cannot return {key!r}: it is not declared in `_can_record_outputs`.",
            expected=", ".join(_PREFIX + key for key in keys) or "no such argument",
            got=f"{name}=True",
            hint=f"nearest: {', '.join(nearest(key, keys)) or 'nothing similar'}.",
        )


def _declared_inside(module: Any, key: str) -> bool:
    """Whether a module inside may be the one that the argument is meant for."""
    return any(key in (getattr(inner, "_can_record_outputs", None) or {}) for inner in module.modules())


def _is_passed_on(name: str, targets: list[Target], parameters: Parameters) -> bool:
    """Whether the forward gets an argument: all but flags of this decorator that it has no parameter for."""
    return parameters.accepts(name) or name.removeprefix(_PREFIX) not in keys_of(targets)


def _captured(
    module: Any, targets: list[Target], requested: Mapping[str, Any], call: Callable[[], Any], tie: bool
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
