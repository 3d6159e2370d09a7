"""State that a model keeps on its modules, and arguments that it changes, as arguments and results of its calls.

A graph has no memory, so a state becomes an argument and a result. What it was before each recorded call is found by
making the calls again.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from exportkit._torch_compat.modules import buffer_table
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.calls.signature import NumberKind, Signature, number_as_tensor, number_in
from exportkit.errors import ExportError, UnregisteredClassError
from exportkit.plan.leaves import is_below
from exportkit.probing.effects import changed_state
from exportkit.probing.size_reads import tensors_read
from exportkit.programs.number_inputs import WithNumbers
from exportkit.running.compare import outputs_close
from exportkit.running.eager import method_of, replayed, run_eager
from exportkit.trees import cloned, flatten, join
from exportkit.trees.structure import path_of

STATE = "module_state"
RESULT = "result"
_FAR = 1000  # added to a state, it changes whatever reads it


@dataclass(frozen=True)
class StatePlace:
    """Where a model keeps a state.

    Attributes:
        module: Path of the module.
        attribute: The attribute or buffer.
        numbers: What the numbers in it are that calls change, by path.
    """

    module: str
    attribute: str
    numbers: Mapping[str, NumberKind]

    @property
    def is_number(self) -> bool:
        """Whether the state is one number."""
        return self.numbers.keys() == {""}

    def opened(self, state: Any) -> Any:
        """Returns a state as the model keeps it; it may be written, and the caller keeps what it gave."""
        tree = flatten(state).map(cloned)
        given = tree.tensors()
        return tree.with_leaves({path: number_in(given[path], kind) for path, kind in self.numbers.items()}).build()

    def closed(self, state: Any) -> Any:
        """Returns a state as it is returned, with tensors for numbers; an integer is a size of one without elements."""
        tree = flatten(state)
        leaves = tree.by_path()
        made = {path: number_as_tensor(leaves[path], kind) for path, kind in self.numbers.items()}
        return tree.with_leaves(made).build()

    def at_start(self, state: Any, start: Callable[[Any], Any], shift: int) -> Any:
        """Returns the state before the first call, in which numbers are 0, and another one if it is shifted."""
        numbers = {path: float(shift) if kind == "float" else shift for path, kind in self.numbers.items()}
        value = flatten(state).with_leaves(numbers).build()
        value = value if self.is_number else start(value)
        return _filled(value, functools.partial(torch.add, other=shift)) if shift else value


def _nothing(value: Any) -> None:
    """A state that is None before the first call."""


def _filled(value: Any, start: Callable[[torch.Tensor], Any]) -> Any:
    return flatten(value).map(lambda leaf: start(leaf) if isinstance(leaf, torch.Tensor) else leaf).build()


def _emptied(value: Any) -> Any:
    """A state without elements."""
    if not isinstance(value, list | dict | deque):
        return None
    kept = copy.copy(value)
    kept.clear()
    return kept


def _one_row(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros for a batch of any size, if the model broadcasts them."""
    return torch.zeros_like(tensor[:1] if tensor.dim() else tensor)


def _without_rows(tensor: torch.Tensor, axis: int) -> torch.Tensor | None:
    """A tensor that has grown along an axis, before it did; None if it has no such axis."""
    if axis >= tensor.dim():
        return None
    return tensor.new_empty([0 if number == axis else size for number, size in enumerate(tensor.shape)])


_zeros = functools.partial(_filled, start=torch.zeros_like)
_STARTS: tuple[Callable[[Any], Any], ...] = (
    _nothing,
    functools.partial(_filled, start=_nothing),
    _zeros,
    _emptied,
    functools.partial(_filled, start=_one_row),
    *(functools.partial(_filled, start=functools.partial(_without_rows, axis=axis)) for axis in range(4)),
)


class WithEffects(torch.nn.Module):
    """A model whose call does nothing but return: what else it does is part of the result.

    It takes the state that it keeps on its modules as ``module_state`` and returns it, and it returns the arguments
    that it changes in place. Its modules stay as they were. Its own hooks run, as they do if a caller calls the model.

    Args:
        model: The model.
        observation: Its calls: which method, and which arguments are given by name.
        places: Where each state is, by the name that it has in ``module_state``.
        written: Arguments that the model changes in place and does not return.
        start: Makes the state before the first call of a state that a call left; numbers are 0 before it.
        shifts: What is added to the tensors and numbers of this state, by its name.

    Attributes:
        begins_anew: Whether each call is a first call: the state is neither taken nor returned.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        observation: Observation,
        places: Mapping[str, StatePlace] | None = None,
        written: Sequence[str] = (),
        start: Callable[[Any], Any] = _nothing,
        shifts: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.model, self._method, self._places = model, observation.method_name, dict(places or {})
        self._start, self._shifts, self.begins_anew = start, shifts, False
        self._written, self._signature = tuple(written), observation.signature
        self._named = observation.always_named
        self.training = model.training

    @property
    def stateful(self) -> bool:
        """Whether the model takes the state that it keeps on its modules, and returns it."""
        return bool(self._places) and not self.begins_anew

    @property
    def wraps(self) -> bool:
        """Whether the result of the model is under ``result``."""
        return self.stateful or bool(self._written)

    def forward(self, *args: Any, module_state: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        """Returns the result, the new state, and the arguments that were changed; no state means a first call."""
        places = self._places
        holders = {name: self.model.get_submodule(place.module) for name, place in places.items()}
        before = {name: getattr(holder, places[name].attribute) for name, holder in holders.items()}
        if module_state is None:
            state = {
                name: place.at_start(before[name], self._start, self._shifts.get(name, 0))
                for name, place in places.items()
            }
        else:
            state = {name: places[name].opened(value) for name, value in module_state.items()}
        model, method, values = self.model, self._method, self._signature.bind(args, kwargs)
        numbers = model if isinstance(model, WithNumbers) else None
        if numbers is not None:  # which would be given copies of what the model changes
            model, method, values = numbers.model, numbers.method, numbers.with_numbers(values)
        args, kwargs = self._signature.unbind(values, self._named)
        try:
            for name, holder in holders.items():
                setattr(holder, places[name].attribute, state.get(name))
            result = method_of(model, method)(*args, **kwargs)
            state = {name: place.closed(getattr(holders[name], place.attribute)) for name, place in places.items()}
        finally:
            for name, holder in holders.items():
                setattr(holder, places[name].attribute, before[name])
        if not self.wraps:
            return result
        values = values if numbers is None else numbers.with_tensors(values)
        written = {name: values[name] for name in self._written if values.get(name) is not None}
        return {RESULT: result, **({STATE: state} if self.stateful else {}), **written}


def with_module_state(
    model: torch.nn.Module, method: str, observation: Observation, written: Sequence[str] = ()
) -> tuple[WithEffects, Observation] | None:
    """Returns the model and its calls with the state that it keeps on its modules, or None if it keeps none.

    A state is an attribute or a buffer of a module that holds tensors, or a number, and that calls change. The calls
    are made again, one after the other, to learn what the state was before each. What it was before the first one is
    not known any more: None, zeros and an empty list or dict are tried, and 0 for numbers. If the calls are the same
    whether the model goes on or begins anew, it goes on.

    Args:
        model: The model, as the recorded calls left it.
        method: The observed method.
        observation: The calls.
        written: Arguments that the model changes in place and does not return.

    Raises:
        ExportError: if the recorded calls do not show what the state was before the first one.
    """
    if not observation.has_values:
        return None
    places = _changed_places(model, method, observation)
    statistics = {name: place for name, place in places.items() if _may_be_statistics(model, place)}
    for found in (statistics, {name: place for name, place in places.items() if name not in statistics}):
        if found and not _are_read(found, model, method, observation):
            places = {name: place for name, place in places.items() if name not in found}
    if not places:
        return None
    extended = replace(observation, signature=_with_parameter(observation.signature), method_name="forward")
    is_ambiguous = False
    for start in _STARTS:
        made = functools.partial(WithEffects, model, observation, places, written, start)
        made_again = functools.partial(_all_made_again, observation=extended, goes_on=start is _zeros)
        stateful = made()
        calls = made_again(stateful)
        if not calls:
            continue
        if not _is_known(places, made, made_again):
            is_ambiguous = True
            continue
        if not any(STATE in call.arguments for call in calls):
            if all(_returns_the_same(model, method, call) for call in observation.calls):
                return None
            going_on = _all_made_again(stateful, extended, goes_on=True)
            if all(STATE in call.arguments for call in going_on[1:]):  # nothing shows that the model was reset
                calls = going_on
        if any(STATE in call.arguments for call in calls):
            return stateful, replace(extended, calls=tuple(calls))
        if len(calls) == 1:
            return None
        stateful.begins_anew = True
        anew = replace(observation, has_values=False, method_name="forward")
        return stateful, replayed(anew, stateful, "forward")
    buffers = [place.attribute in buffer_table(model.get_submodule(place.module)) for place in places.values()]
    if is_ambiguous and not all(buffers):  # a trace shows what becomes of buffers
        raise ExportError(
            "The model's result depends on state that it keeps, and the calls fit more than one initial state.",
            where=", ".join(join(place.module, place.attribute) for place in places.values()),
            expected="calls whose results show what the state was before the first call",
            hint="take the state as an argument and return the new one, or observe calls in which it matters.",
        )
    return None


def _is_known(
    names: Collection[str], made: Callable[..., WithEffects], made_again: Callable[[WithEffects], list[Call]]
) -> bool:
    """Whether a start that serves the calls is the right one: no other one near it does, or any other one does.

    Args:
        names: Names of the states.
        made: Makes the model with something added to its start.
        made_again: Returns the recorded calls, or none that such a model does not serve.
    """

    def serves(shifts: Mapping[str, int]) -> bool:
        return bool(made_again(made(shifts=shifts)))

    if serves(dict.fromkeys(names, _FAR)):
        return True
    return not any((serves({name: 1}) or serves({name: -1})) and not serves({name: _FAR}) for name in names)


def _changed_places(model: torch.nn.Module, method: str, observation: Observation) -> dict[str, StatePlace]:
    """Where a call changes tensors and numbers on modules, by a name for it."""
    # the model may raise for the first call in the state that the last one left
    changed = changed_state(model, method, observation.calls[0], observation.calls[-1], or_written=True)
    places = {}
    for path, module in model.named_modules() if changed else ():
        for name, value in {**vars(module), **dict(module.named_buffers(recurse=False))}.items():
            place = path_of((name,), path)
            if any(is_below(item, place) for item in changed):
                with contextlib.suppress(UnregisteredClassError):
                    tree = flatten(value)
                    numbers: dict[str, NumberKind] = {
                        inner: "size" if type(leaf) is int else "float"
                        for inner, leaf in tree.constants().items()
                        if type(leaf) in (int, float) and (place in changed or join(place, inner) in changed)
                    }
                    if numbers or tree.tensors():
                        places[f"{path}.{name}".replace(".", "_")] = StatePlace(path, name, numbers)
    return places


def _may_be_statistics(model: torch.nn.Module, place: StatePlace) -> bool:
    """Whether a state is a buffer or a number, which models also count and average with."""
    return place.attribute in buffer_table(model.get_submodule(place.module)) or place.is_number


def _are_read(places: Mapping[str, StatePlace], model: torch.nn.Module, method: str, observation: Observation) -> bool:
    """Whether what is in these places makes a difference.

    Statistics are read if some result differs with NaN in their places, which masks and empty slots pass on, or with
    infinity, which comparisons go by; and counters, if it differs after many calls. Anything else is also read if code
    gets its tensors, whose shape may decide, or misses what is not there.
    """
    starts: list[Callable[[Any], Any]] = [functools.partial(_filled, start=_unlike)]
    starts.append(functools.partial(_filled, start=functools.partial(_unlike, value=math.inf)))
    if not all(_may_be_statistics(model, place) for place in places.values()):
        starts.append(functools.partial(_filled, start=_nothing))
        starts.append(lambda value: value if (kept := _emptied(value)) is None else kept)
        held = {name: getattr(model.get_submodule(p.module), p.attribute) for name, p in places.items()}
        tensors = flatten({STATE: held}).tensors()
        if not tensors_read(model, method, observation.calls, tensors).isdisjoint(tensors):
            return True
    are_numbers = all(place.is_number for place in places.values())  # others may say how many values a tensor holds
    shifts = [{}, dict.fromkeys(places, _FAR)] if are_numbers else [{}]
    for start, shift in itertools.product(starts, shifts):
        other = WithEffects(model, observation, places, start=start, shifts=shift)
        other.begins_anew = True
        for call in observation.calls:
            try:
                runs = [run_eager(*target, call) for target in ((model, method), (other, "forward"))]
            except Exception:
                return True
            if not outputs_close(*(flatten(outputs).tensors() for outputs in runs)):
                return True
    return False


def _unlike(tensor: torch.Tensor, value: float = math.nan) -> torch.Tensor:
    return torch.full_like(tensor, value) if tensor.is_floating_point() else tensor + 1


def _returns_the_same(model: torch.nn.Module, method: str, call: Call) -> bool:
    """Whether the model returns what was recorded, in the state that it is in."""
    try:
        return outputs_close(call.outputs.tensors(), flatten(run_eager(model, method, call)).tensors())
    except Exception:
        return False


def _all_made_again(model: WithEffects, observation: Observation, goes_on: bool) -> list[Call]:
    """The calls with the state that each needs; none if they do not return what was recorded."""
    calls: list[Call] = []
    state: Mapping[str, Any] | None = None
    for call in observation.calls:
        made = _made_again(model, observation, call, state, goes_on)
        if made is None:
            return []
        calls.append(made[0])
        state = made[1]
    return calls


def _with_parameter(signature: Signature) -> Signature:
    last = [name for name in signature.names if name == signature.var_keyword]
    names = [name for name in signature.names if name not in last]
    return replace(signature, names=(*names, STATE, *last), defaults={**signature.defaults, STATE: None})


def _made_again(
    model: WithEffects, observation: Observation, call: Call, state: Mapping[str, Any] | None, goes_on: bool
) -> tuple[Call, Mapping[str, Any]] | None:
    """The call with the state that it needs (none, or what the call before left), and the state that it leaves.

    If it returns the same with both, it goes on from the call before if that is asked for.
    """
    expected = {f"{RESULT}.{path}" if path else RESULT: t for path, t in call.outputs.tensors().items()}
    for before in ((state, None) if goes_on else (None, state)) if state is not None else (None,):
        arguments = {n: t for n, t in call.arguments.items() if n in observation.signature.plain()}
        arguments |= {} if before is None else {STATE: flatten(dict(before))}
        arguments |= {n: t for n, t in call.arguments.items() if n not in arguments}
        try:
            given = replace(call, arguments=arguments, signature=observation.signature)
            outputs = run_eager(model, "forward", given)
        except Exception:
            continue
        tree = flatten(outputs).map(cloned)
        got = tree.tensors()
        if outputs_close(expected, got):
            return replace(given, outputs=tree), tree.build()[STATE]
    return None
