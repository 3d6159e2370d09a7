"""The model in the form that is exported: everything that a call does is part of its result.

A graph has no memory, so a state that a model keeps on its modules between calls becomes an argument and a result.
Arguments that the model changes in place become results. What modules inside the model return can be added to its
result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from exportkit._torch_compat.modules import has_hooks
from exportkit.calls.application import require_parameters
from exportkit.calls.call import Call, Signature
from exportkit.calls.observation import Observation
from exportkit.probing.effects import written_arguments
from exportkit.programs.number_inputs import Numbers, with_numbers
from exportkit.running.compare import outputs_close
from exportkit.running.eager import replayed, run_eager
from exportkit.trees import flatten, join

STATE = "module_state"
RESULT = "result"


def exported_form(
    model: torch.nn.Module,
    observation: Observation,
    outputs: Mapping[str, Any],
    carries_state: bool = True,
    numbers: Numbers = MappingProxyType({}),
) -> tuple[torch.nn.Module, Observation]:
    """Returns the model in the form to export, and its calls as they would have been made to that.

    Args:
        model: The model, as the recorded calls left it.
        observation: Its calls.
        outputs: What modules inside the model return and the graph shall return too, by key.
        carries_state: Whether a state that the model keeps on its modules becomes an argument and a result.
        numbers: Python numbers that become inputs, with their types.

    Raises:
        InvalidRequestError: if ``outputs`` names modules that the model does not have, or the model does not take the
            arguments of the calls.
    """
    target = observation.method_name
    given = {name for call in observation.calls for name in call.names()}
    require_parameters(model, target, filter(given.__contains__, observation.signature.names), observation.model_name)
    if outputs:
        model, observation = with_outputs(model, observation.method_name, observation, outputs)
    method = observation.method_name
    written = written_arguments(observation, model, method)
    lost = [name for name, item in written.items() if item.place is None]
    hooked = method == "forward" and has_hooks(model)
    if numbers:
        model, observation = with_numbers(model, observation, numbers)
        method = "forward"
    stateful = with_module_state(model, method, observation, lost) if carries_state else None
    if stateful is not None:
        model, observation = stateful
    elif lost or (hooked and not numbers):
        model = WithEffects(model, observation, written=lost)
        observation = replayed(replace(observation, has_values=False, method_name="forward"), model, "forward")
    if isinstance(model, WithEffects) and model.wraps:
        for name, item in written.items():
            written[name] = replace(item, place=name if item.place is None else join(RESULT, item.place))
    if hooked and (numbers or isinstance(model, WithEffects)):
        target = "__call__"
    return model, replace(observation, written=written, target=target)


class WithOutputs(torch.nn.Module):
    """A model whose result has captured values under their keys.

    A result that is not a mapping is under ``result``; one of a class without such fields becomes a dict.

    Args:
        model: The model.
        method: The method to call.
        specs: What to capture under each key, as `exportkit.capture` takes it.

    Raises:
        InvalidRequestError: if a spec matches no module.
    """

    def __init__(self, model: torch.nn.Module, method: str, specs: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        from exportkit.module_outputs.context import with_captured  # only where outputs are asked for

        self._call = with_captured(model, specs, method)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the model with the captured values in it."""
        result, captured = self._call(*args, **kwargs)
        if not isinstance(result, dict):
            return {RESULT: result, **captured}
        if not _takes(result, captured):
            return {**result, **captured}
        for key, values in captured.items():
            result[key] = values
        return result


def _takes(result: Any, keys: Iterable[str]) -> bool:
    """Whether a result has a place for these keys: outputs of transformers have fields, a plain dict takes any key."""
    return not is_dataclass(result) or {*keys} <= {field.name for field in fields(result)}


def with_outputs(
    model: torch.nn.Module, method: str, observation: Observation, specs: Mapping[str, Any]
) -> tuple[WithOutputs, Observation]:
    """Returns the model with more outputs, and its calls with these outputs; the model runs again to get them.

    Args:
        model: The model.
        method: The observed method.
        observation: Its calls.
        specs: What to capture under each key.

    Raises:
        InvalidRequestError: if a spec matches no module.
    """
    extended = WithOutputs(model, method, specs)
    return extended, replayed(replace(observation, has_values=False, method_name="forward"), extended, "forward")


class WithEffects(torch.nn.Module):
    """A model whose call does nothing but return: what else it does is part of the result.

    It takes the state that it keeps on its modules as ``module_state`` and returns it, and it returns the arguments
    that it changes in place. Its modules stay as they were. Its own hooks run, as they do if a caller calls the model.

    Args:
        model: The model.
        observation: Its calls: which method, and which arguments are given by name.
        places: Submodule and attribute of each state, by the name that it has in ``module_state``.
        written: Arguments that the model changes in place and does not return.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        observation: Observation,
        places: Mapping[str, tuple[str, str]] | None = None,
        written: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.model, self._method, self._places = model, observation.method_name, dict(places or {})
        self._written, self._signature = tuple(written), observation.signature
        self._named = observation.always_named
        self.training = model.training

    @property
    def stateful(self) -> bool:
        """Whether the model keeps a state on its modules."""
        return bool(self._places)

    @property
    def wraps(self) -> bool:
        """Whether the result of the model is under ``result``."""
        return bool(self._places or self._written)

    def forward(self, *args: Any, module_state: Mapping[str, torch.Tensor] | None = None, **kwargs: Any) -> Any:
        """Returns the result, the new state, and the arguments that were changed; no state means a first call."""
        holders = {name: self.model.get_submodule(module) for name, (module, _) in self._places.items()}
        before = {name: getattr(holder, self._places[name][1]) for name, holder in holders.items()}
        values = self._signature.bind(args, kwargs)
        args, kwargs = self._signature.unbind(values, self._named)
        try:
            for name, holder in holders.items():
                setattr(holder, self._places[name][1], None if module_state is None else module_state.get(name))
            target = self.model if self._method == "forward" else getattr(self.model, self._method)
            result = target(*args, **kwargs)
            state = {name: getattr(holder, self._places[name][1]) for name, holder in holders.items()}
        finally:
            for name, holder in holders.items():
                setattr(holder, self._places[name][1], before[name])
        if not self.wraps:
            return result
        written = {name: values[name] for name in self._written if values.get(name) is not None}
        return {RESULT: result, **({STATE: state} if state else {}), **written}


def with_module_state(
    model: torch.nn.Module, method: str, observation: Observation, written: Sequence[str] = ()
) -> tuple[WithEffects, Observation] | None:
    """Returns the model and its calls with the state that it keeps on its modules, or None if it keeps none.

    A state is a tensor attribute of a module, neither a parameter nor a buffer, that calls replace. The calls are made
    again, one after the other, to learn what the state was before each.

    Args:
        model: The model, as the recorded calls left it.
        method: The observed method.
        observation: The calls.
        written: Arguments that the model changes in place and does not return.
    """
    places = {
        f"{path}.{name}".replace(".", "_"): (path, name)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }
    if places and observation.has_values:
        places = _replaced(places, model, method, observation)
    if not places or not observation.has_values:
        return None
    stateful = WithEffects(model, observation, places, written)
    signature = _with_parameter(observation.signature)
    extended = replace(observation, signature=signature, method_name="forward")
    calls: list[Call] = []
    state: Mapping[str, torch.Tensor] | None = None
    for call in observation.calls:
        made = _made_again(stateful, extended, call, state)
        if made is None:
            return None
        calls.append(made[0])
        state = made[1]
    if not any(STATE in call.arguments for call in calls):
        return None
    return stateful, replace(extended, calls=tuple(calls))


def _replaced(
    places: Mapping[str, tuple[str, str]], model: torch.nn.Module, method: str, observation: Observation
) -> dict[str, tuple[str, str]]:
    """The places at which a call leaves a different tensor or different values; what was there is put back."""
    holders = {name: (model.get_submodule(module), attribute) for name, (module, attribute) in places.items()}
    before = {name: getattr(*place) for name, place in holders.items()}
    values = {name: tensor.clone() for name, tensor in before.items()}
    after: dict[str, Any] = {}

    def around(arguments: dict[str, Any], call: Callable[[Mapping[str, Any]], Any]) -> None:
        call(arguments)
        after.update({name: getattr(*place) for name, place in holders.items()})

    try:
        run_eager(model, method, observation.calls[0], around)
        return {n: places[n] for n in places if after[n] is not before[n] or not torch.equal(after[n], values[n])}
    except Exception:
        return {}
    finally:
        for name, tensor in before.items():
            tensor.copy_(values[name])


def _with_parameter(signature: Signature) -> Signature:
    last = [name for name in signature.names if name == signature.var_keyword]
    names = [name for name in signature.names if name not in last]
    return replace(signature, names=(*names, STATE, *last), defaults={**signature.defaults, STATE: None})


def _made_again(
    model: WithEffects, observation: Observation, call: Call, state: Mapping[str, torch.Tensor] | None
) -> tuple[Call, Mapping[str, torch.Tensor]] | None:
    """The call with the state that it needs (none, or what the call before left), and the state that it leaves."""
    expected = {f"{RESULT}.{path}" if path else RESULT: t for path, t in call.outputs.tensors().items()}
    for before in (None, state) if state is not None else (None,):
        arguments = {n: t for n, t in call.arguments.items() if n in observation.signature.plain()}
        arguments |= {} if before is None else {STATE: flatten(dict(before))}
        arguments |= {n: t for n, t in call.arguments.items() if n not in arguments}
        try:
            given = replace(call, arguments=arguments, signature=observation.signature)
            outputs = run_eager(model, "forward", given)
        except Exception:
            continue
        tree = flatten(outputs).map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)
        got = tree.tensors()
        if outputs_close(expected, got):
            return replace(given, outputs=tree), tree.build()[STATE]
    return None
