"""Runs the model to find what a trace does not show: which constants change nothing, and what else the model reads.

A call may leave out a constant although the model's default differs: ``generate`` passes ``use_cache=True``
where the default is None, and means the same. What a call leaves out has its default, so a graph serves such calls if
the model runs the same operators on the same arguments with it, makes the same decisions by sizes, and returns the
same. The same holds for a constant that calls gave with several values. A number or a string in ``**kwargs`` that the
model never reads, such as the length of a prompt, may have any value.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from exportkit._torch_compat.tracing import operators_of
from exportkit.arguments.build import build_call
from exportkit.calls.call import Call
from exportkit.errors import ArgumentError
from exportkit.plan.sizes import unseen_sizes
from exportkit.probing.size_reads import SizeReads
from exportkit.probing.traits import APART, Traits, find_traits
from exportkit.programs.kinds import CallClassifier, kinds_of
from exportkit.programs.program import TracedProgram
from exportkit.running.compare import same_value
from exportkit.running.eager import run_eager, sampled_answer
from exportkit.trees import Fingerprint, fingerprint, flatten
from exportkit.trees.structure import path_of

_MOST_UNSEEN = 2
_LEFT_OUT = object()
_Constants = dict[str, Any]  # values of constants by path, or _LEFT_OUT


class _Effect(IntEnum):
    """What other constants change: nothing; only what the model returns, or whether it runs; or the code that runs."""

    NONE = 0
    RESULT = 1
    CODE = 2


def with_harmless_constants(traced: TracedProgram) -> TracedProgram:
    """Returns the program with a domain that allows constants that change nothing: left out, or as in recorded calls.

    Args:
        traced: The program, whose model is run.
    """
    observation = traced.observation
    values = replace(traced.domain.values, unread=tuple(_unread(traced)))
    made = [*(call.arguments for call in observation.calls), *map(observation.constants_of, observation.further)]
    refused = [item for arguments in made for item in values.refused(arguments).items()]
    others = {(path, fingerprint(value)): value for path, value in refused}
    wanted = [{path: _LEFT_OUT} for path in values.required()] + [{path: v} for (path, _), v in others.items()]
    for constants in _harmless(traced, wanted) if wanted else ():
        found = {path: None if value is _LEFT_OUT else fingerprint(value) for path, value in constants.items()}
        values = values.allowing(found)
    return replace(traced, domain=replace(traced.domain, values=values))


def _harmless(traced: TracedProgram, wanted: Sequence[_Constants]) -> list[_Constants]:
    """The constants that change nothing: each of them alone, and all together."""
    calls = list(_calls(traced))
    effects = traced.sampled_answer(lambda: _effects(traced, calls, wanted))
    unsure = [item for item, effect in zip(wanted, effects, strict=True) if effect is _Effect.RESULT]
    sure = iter(_effects(traced, calls, unsure))
    effects = [next(sure) if effect is _Effect.RESULT else effect for effect in effects]
    found = [item for item, effect in zip(wanted, effects, strict=True) if effect is _Effect.NONE]
    together = {path: value for constants in reversed(found) for path, value in constants.items()}
    if len(found) < 2 or traced.sampled_answer(lambda: _change_nothing(traced, calls, [together]), bool):
        return found
    return []


def _unread(traced: TracedProgram) -> list[str]:
    """The numbers and strings in ``**kwargs`` that the model never reads.

    It gets one of the same type that raises whatever it is asked, and another value, which code in C reads.
    """
    catch_all = traced.observation.signature.var_keyword
    given = traced.observation.merged_arguments.get(catch_all or "")
    if given is None or catch_all is None:
        return []
    found = {path_of((key,), catch_all): value for key, value in given.build().items()}
    found = {path: value for path, value in found.items() if type(value) in (int, float, str)}
    calls = list(_calls(traced, unseen=0))

    def is_unread(paths: Iterable[str]) -> bool:
        others = [{path: _raising(found[path]) for path in paths}, {path: _other(found[path]) for path in paths}]
        return traced.sampled_answer(lambda: _change_nothing(traced, calls, others))

    return list(found) if found and is_unread(found) else [path for path in found if is_unread([path])]


def _other(value: Any) -> Any:
    return f"{value}?" if isinstance(value, str) else value + 1


def _raising(value: Any) -> Any:
    def asked(*_args: Any, **_kwargs: Any) -> Any:
        raise TypeError("The value is read.")

    kind = type(value)
    names = set(dir(kind)) - {"__new__", "__init__", "__class__", "__getattribute__"}
    members = {name: asked if callable(getattr(kind, name)) else property(asked) for name in names}
    return type(kind.__name__, (kind,), members)(value)


def with_traits(traced: TracedProgram) -> TracedProgram:
    """Returns the program with a domain that asks for what the model reads of its arguments besides their values.

    Args:
        traced: The program, whose model is run.
    """
    found, names = Traits(), set[str]()
    for call in reversed(list(_calls(traced, unseen=0))):  # first the traced one, which has all inputs
        with contextlib.suppress(Exception):  # whatever the model raises for a call that it does not accept
            ask = functools.partial(find_traits, traced.model, traced.method, call, names)
            found |= sampled_answer(traced.model, ask)  # of all layers: it compares the results of different runs
    wanted = found.tensors
    if any(item.in_place for item in traced.observation.written.values()):
        wanted = tuple(dict.fromkeys((*wanted, APART)))  # what is written may be a part of no other input
    domain = replace(traced.domain, traits=wanted, values=replace(traced.domain.values, orders=found.orders))
    return replace(traced, domain=domain, plan=traced.plan.with_findings(found.findings()))


def _calls(traced: TracedProgram, unseen: int = _MOST_UNSEEN) -> Iterator[Call]:
    """Yields the first recorded call of each kind, the traced one, and some at sizes that were never run."""
    observation = traced.observation
    for first, *_ in kinds_of(observation, CallClassifier.of(observation)).values():
        yield first
    others = [item.sizes for item in unseen_sizes(traced.plan, traced.sizes)]
    for sizes in (traced.sizes, *others[:unseen]):
        with contextlib.suppress(ArgumentError):  # few tokens may have no room for their placeholders
            yield build_call(traced.plan, observation, sizes)


def _change_nothing(traced: TracedProgram, calls: list[Call], wanted: Sequence[_Constants]) -> bool:
    """Whether none of the constants has an effect."""
    return all(effect is _Effect.NONE for effect in _effects(traced, calls, wanted))


def _effects(traced: TracedProgram, calls: list[Call], wanted: Sequence[_Constants]) -> list[_Effect]:
    """What each of the constants changes in the calls for which the model runs."""
    logs = {place: _log(traced, call) for place, call in enumerate(calls)} if wanted else {}
    again = set[int]()

    def effect(place: int, constants: _Constants) -> _Effect:
        other = _log(traced, _with(calls[place], constants))
        found = _effect(logs[place], other)
        if found is not _Effect.NONE and other is not None and place not in again:
            again.add(place)  # code that runs once in a process is not the call's
            logs[place] = _log(traced, calls[place]) or logs[place]
            found = _effect(logs[place], other)
        return found

    def effect_on_all(constants: _Constants) -> _Effect:
        found = []
        for place in (place for place, log in logs.items() if log is not None):
            found.append(effect(place, constants))
            if found[-1] is _Effect.CODE:
                break
        return max(found, default=_Effect.RESULT)

    return [effect_on_all(constants) for constants in wanted]


def _with(call: Call, constants: _Constants) -> Call:
    signature, arguments = call.signature, dict[str, Any](call.arguments)
    catch_all = signature.var_keyword or ""
    caught = arguments[catch_all].build() if catch_all in arguments else {}
    for path, value in constants.items():
        key = next((key for key in caught if path_of((key,), catch_all) == path), None)
        if key is None and catch_all:
            key = path.removeprefix(f"{catch_all}.") if path.startswith(f"{catch_all}.") else None
        if key is not None:
            caught = {**caught, key: value}
        elif path in signature.names:
            arguments[path] = value if value is _LEFT_OUT else flatten(value)
    caught = {key: value for key, value in caught.items() if value is not _LEFT_OUT}
    if caught or catch_all in arguments:
        arguments[catch_all] = flatten(caught)
    given = {name: arguments[name] for name in signature.names if arguments.get(name, _LEFT_OUT) is not _LEFT_OUT}
    return replace(call.with_arguments(given), named=call.named | (given.keys() - call.arguments.keys()))


class _Log(NamedTuple):
    """What the model does in a call.

    Attributes:
        operators: The operators that it runs, and on what.
        reads: What it reads from tensors, and which code runs.
        form: What it returns, without the values of tensors.
        tensors: The tensors that it returns.
    """

    operators: Any
    reads: SizeReads
    form: Fingerprint
    tensors: list[torch.Tensor]

    def may_differ_from(self, other: _Log) -> bool:
        """Whether it may do something else than in a call in which it does the same, for other sizes or values.

        Its own code then branches on values, or compares what may be a number that was made of sizes or values.
        """
        code = self.reads.code_beyond([other.reads])
        reads_numbers = bool(self.reads.lost() or self.reads.numbers)
        compares = reads_numbers and any(part.compares() for part in code)
        return compares or bool(self.reads.values_beyond([other.reads]))


def _effect(log: _Log | None, other: _Log | None) -> _Effect:
    """What the constants of another call change."""
    if log is None or other is None:
        return _Effect.RESULT
    done = [(one.operators, one.reads.log, one.form) for one in (log, other)]
    if done[0] != done[1] or log.may_differ_from(other) or other.may_differ_from(log):
        return _Effect.CODE
    return _Effect.NONE if all(map(same_value, log.tensors, other.tensors)) else _Effect.RESULT


def _log(traced: TracedProgram, call: Call) -> _Log | None:
    """What the model does; None if it raises."""
    try:
        reads = SizeReads()
        with reads:
            returned, operators = operators_of(lambda: run_eager(traced.model, traced.method, call))
    except Exception:
        return None
    tree = flatten(returned)
    return _Log(operators, reads, fingerprint(tree.build()), [tensor.clone() for tensor in tree.tensors().values()])
