"""Models that keep their state on their modules between calls, in a form that takes and returns it.

In come a model and its recorded calls; out come a model with one more argument and one more result, and the calls as
they would have been made to that. A graph has no memory, so whoever calls it hands the state from call to call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.calls.signature import Signature
from exportkit.running.compare import outputs_close
from exportkit.running.eager import run_eager
from exportkit.trees import flatten
from exportkit.trees.caches import is_cache_class

STATE = "module_state"
RESULT = "result"


class WithState(torch.nn.Module):
    """A model that takes what it keeps on its modules as ``module_state``, and returns it beside its own result.

    Caches that it fills in place and does not return are returned too. Its modules are left as they were.

    Args:
        model: The model.
        method: The method to call.
        places: Submodule and attribute of each state, by the name that it has in ``module_state``.
    """

    def __init__(self, model: torch.nn.Module, method: str, places: Mapping[str, tuple[str, str]]) -> None:
        super().__init__()
        self.model, self._method, self._places = model, method, places
        self.training = model.training

    def forward(self, *args: Any, module_state: Mapping[str, torch.Tensor] | None = None, **kwargs: Any) -> Any:
        """Returns the result, the new state, and the caches that were filled; without a state as in a first call."""
        holders = {name: self.model.get_submodule(module) for name, (module, _) in self._places.items()}
        before = {name: getattr(holder, self._places[name][1]) for name, holder in holders.items()}
        try:
            for name, holder in holders.items():
                setattr(holder, self._places[name][1], None if module_state is None else module_state.get(name))
            result = getattr(self.model, self._method)(*args, **kwargs)
            state = {name: getattr(holder, self._places[name][1]) for name, holder in holders.items()}
        finally:
            for name, holder in holders.items():
                setattr(holder, self._places[name][1], before[name])
        returned = result if isinstance(result, Mapping) else {}
        filled = {n: v for n, v in kwargs.items() if is_cache_class(type(v)) and returned.get(n) is None}
        return {RESULT: result, STATE: state, **filled}


def with_module_state(
    model: torch.nn.Module, method: str, observation: Observation
) -> tuple[WithState, Observation] | None:
    """Returns the model and its calls with the state that it keeps on its modules, or None if it keeps none.

    A state is a tensor that is an attribute of a module, neither a parameter nor a buffer, and that calls replace. The
    calls are made again, one after the other, to learn what it was before each.

    Args:
        model: The model, as the recorded calls left it.
        method: The observed method.
        observation: The calls.
    """
    places = _held_tensors(model)
    if places and observation.has_values:
        places = _replaced(places, model, method, observation)
    if not places or not observation.has_values:
        return None
    stateful = WithState(model, method, places)
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


def _held_tensors(model: torch.nn.Module) -> dict[str, tuple[str, str]]:
    return {
        f"{path}.{name}".replace(".", "_"): (path, name)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def _replaced(
    places: Mapping[str, tuple[str, str]], model: torch.nn.Module, method: str, observation: Observation
) -> dict[str, tuple[str, str]]:
    """The places at which a call leaves another tensor, or other values in it; what was there is put back."""
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
    model: WithState, observation: Observation, call: Call, state: Mapping[str, torch.Tensor] | None
) -> tuple[Call, Mapping[str, torch.Tensor]] | None:
    """The call with the state it needs, none or the one that the call before left, and the state that it leaves."""
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
