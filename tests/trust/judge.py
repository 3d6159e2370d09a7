"""Takes a case from the recording to the graph, and says whether each call was right, loud or silent."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from torch import nn

import exportkit
from tests.trust.cases import Call, Case

Outcome = Literal["right", "loud", "silent"]


@dataclass(frozen=True)
class Judged:
    """One call: what became of it, and why."""

    call: str
    outcome: Outcome
    why: str = ""
    has_to_be_right: bool = False


@dataclass
class Verdict:
    """What became of a case.

    Attributes:
        case: The case.
        calls: What became of each call.
        alarm: What was loud about the case as a whole: an error, or the problems of the report.
        crash: An exception that is not one of exportkit.
    """

    case: Case
    calls: list[Judged] = field(default_factory=list)
    alarm: str = ""
    crash: str = ""

    @property
    def outcome(self) -> Outcome:
        """The worst outcome of the calls."""
        outcomes = {judged.outcome for judged in self.calls}
        return "silent" if "silent" in outcomes else "loud" if "loud" in outcomes or self.alarm else "right"

    def faults(self) -> list[str]:
        """Returns what is wrong with the tool, a line each: silent mistakes, refusals, exceptions of other packages."""
        found = [f"silent: {judged.call}: {judged.why}" for judged in self.calls if judged.outcome == "silent"]
        if self.crash:
            found.append(f"crashed: {self.crash}")
        if not self.case.may_refuse:
            found += [f"not proven: {self.alarm}"] if self.alarm else []
            refused = [judged for judged in self.calls if judged.has_to_be_right and judged.outcome == "loud"]
            found += [f"not served: {judged.call}: {judged.why}" for judged in refused if not self.alarm]
        return found

    def accepted(self) -> str:
        """Returns which calls were answered, and how many."""
        answered = [judged.call for judged in self.calls if judged.outcome != "loud"]
        return f"{len(answered)} of {len(self.calls)}: {'; '.join(answered)}"


def judge(case: Case, runtime: Literal["onnxruntime"] | None = None) -> Verdict:
    """Returns what became of a case.

    Args:
        case: The case.
        runtime: What the graph is fused for; without one, it is portable.
    """
    torch.manual_seed(0)
    model, verdict = case.model(), Verdict(case)
    model = model if case.training else model.eval()
    fresh = copy.deepcopy(model)
    recorded = _recorded_calls(case, copy.deepcopy(model))
    calls = [(f"recorded {call}", call, True) for call in recorded]
    calls += [(str(call), call, True) for call in case.serves] + [(str(call), call, False) for call in case.truth]
    with tempfile.TemporaryDirectory(prefix="trust-") as folder:
        path = Path(folder) / "model.onnx"
        graph, findings = _exported(
            case, model, verdict, len(recorded), lambda found: found.to_onnx(path, runtime=runtime)
        )
        # A model that keeps something between calls may go on from the start, or from the recorded calls.
        references = [fresh, copy.deepcopy(model)]
        for label, call, has_to_be_right in calls:
            if graph is None:
                outcome, why = "loud", verdict.alarm or verdict.crash
            else:
                outcome, why = _judged(case, references, graph, call, verdict)
            if outcome == "silent" and (verdict.alarm or (case.finding and re.search(case.finding, findings))):
                outcome = "loud"
            verdict.calls.append(Judged(label, outcome, why, has_to_be_right))
    return verdict


def _recorded_calls(case: Case, model: nn.Module) -> list[Call]:
    """The calls of ``forward``, in a run of a copy of the model."""
    if not callable(case.recorded):
        return list(case.recorded)
    calls: list[Call] = []
    model.register_forward_pre_hook(lambda _, *given: calls.append(Call(*given).copied()), with_kwargs=True)
    case.recorded(model)
    return calls


def _exported(
    case: Case, model: nn.Module, verdict: Verdict, count: int, translate: Callable[[exportkit.Exported], Any]
) -> tuple[Any, str]:
    """The graph, or None, and the findings about it."""
    try:
        observer = exportkit.InputObserver()
        with observer(model, store_n_calls=count):
            if callable(case.recorded):
                case.recorded(model)
            else:
                for own in map(Call.copied, case.recorded):
                    model(*own.args, **own.kwargs)
        exported = exportkit.export(model, observer if case.plan is None else case.plan(observer.plan()))
        graph = translate(exported)
        report = graph.verify()
    except exportkit.ExportkitError as error:
        verdict.alarm = f"{type(error).__name__}: {error}"
    except Exception as error:
        verdict.crash = f"{type(error).__name__}: {error}"
    else:
        verdict.alarm = "" if report.ok else "; ".join(report.problems())
        return graph, str(report)
    return None, ""


def _judged(case: Case, references: list[nn.Module], graph: Any, call: Call, verdict: Verdict) -> tuple[Outcome, str]:
    """What becomes of one call: the result and the arguments afterwards have to be those of a reference."""
    own = call.copied()
    try:
        result = graph(*own.args, **own.kwargs)
    except exportkit.ExportkitError as error:
        return "loud", f"{type(error).__name__}: {error}"
    except Exception as error:
        verdict.crash = verdict.crash or f"{type(error).__name__}: {error}"
        return "loud", verdict.crash
    expected, raised = [], ""
    for reference in references:  # which keep in step with the graph: they are not called if the graph refuses
        arguments = call.copied()
        try:
            expected.append((reference(*arguments.args, **arguments.kwargs), arguments))
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
    if not expected:
        return "silent", f"answered, but the model raises {raised}"
    found = []
    for value, arguments in expected:
        if case.same is not None:
            difference = "" if case.same(value, result) else f"expected {value}, got {result}"
        else:
            difference = next(differences(value, result, case.slack), "")
        difference = difference or next(differences(*map(_without_caches, (arguments, own)), 1.0, "arguments"), "")
        if not difference:
            return "right", ""
        found.append(difference)
    return "silent", found[-1]


def _without_caches(call: Call) -> list[Any]:
    """The arguments, except for caches, which the model extends in place; the graph returns them instead."""
    values = [*call.args, *(call.kwargs[name] for name in sorted(call.kwargs))]
    return [value for value in values if not type(value).__name__.endswith("Cache")]


# Relative error that is allowed: far above rounding in these tiny models, and far below any mistake.
_RELATIVE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-6, torch.complex128: 1e-6}
_BY_SCALE = 0.02  # the share of it that also holds against the largest value, for sums that cancel


def differences(expected: Any, got: Any, slack: float = 1.0, where: str = "result") -> Iterator[str]:
    """Yields where two values differ in structure, in type, or by more than rounding."""
    if expected is got:
        return
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
        text = _tensors_differ(expected.detach(), got.detach(), slack)
        yield from [f"{where}: {text}"] if text else []
    elif type(expected) is not type(got):
        yield f"{where}: expected {type(expected).__name__} {expected!r}, got {type(got).__name__} {got!r}"
    elif isinstance(expected, Mapping):
        if list(expected) != list(got):
            yield f"{where}: expected keys {list(expected)}, got {list(got)}"
        else:
            for key in expected:
                yield from differences(expected[key], got[key], slack, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        if len(expected) != len(got):
            yield f"{where}: expected {len(expected)} elements, got {len(got)}"
        for index, pair in enumerate(zip(expected, got, strict=False)):
            yield from differences(*pair, slack, f"{where}[{index}]")
    elif isinstance(expected, numpy.ndarray):
        yield from differences(*map(torch.from_numpy, (expected, got)), slack, where)
    elif isinstance(expected, float):
        if not (math.isclose(expected, got, rel_tol=1e-6) or (math.isnan(expected) and math.isnan(got))):
            yield f"{where}: expected {expected}, got {got}"
    elif type(expected).__name__ == "EncoderDecoderCache":
        for name in ("self_attention_cache", "cross_attention_cache"):
            yield from differences(*(getattr(cache, name) for cache in (expected, got)), slack, f"{where}.{name}")
    elif type(expected).__name__.endswith("Cache") and hasattr(expected, "layers"):  # what a cache counts is its own
        for index, pair in enumerate(zip(expected.layers, got.layers, strict=True)):
            for name in ("keys", "values", "conv_states", "recurrent_states"):
                if hasattr(pair[0], name):
                    states = [getattr(layer, name, None) for layer in pair]
                    yield from differences(*states, slack, f"{where}[{index}].{name}")
    elif (
        dataclasses.is_dataclass(expected)
        or isinstance(expected, types.SimpleNamespace)
        or type(expected).__eq__ is object.__eq__
    ):
        names = expected.__slots__ if hasattr(expected, "__slots__") else getattr(expected, "__dict__", {})
        for name in names:
            yield from differences(getattr(expected, name), getattr(got, name), slack, f"{where}.{name}")
    elif expected != got:
        yield f"{where}: expected {expected!r}, got {got!r}"


def _tensors_differ(expected: torch.Tensor, got: torch.Tensor, slack: float) -> str:
    """How two tensors differ, or nothing."""
    for name in ("dtype", "shape"):
        if getattr(expected, name) != getattr(got, name):
            return f"expected {name} {getattr(expected, name)}, got {getattr(got, name)}"
    if not (expected.is_floating_point() or expected.is_complex()):
        wrong = expected != got
    else:
        wide = torch.complex128 if expected.is_complex() else torch.float64
        a, b = expected.to(wide), got.to(wide)
        finite = a.isfinite() & b.isfinite()
        scale = a[finite].abs().max() if finite.any() else 0.0
        relative = slack * _RELATIVE.get(expected.dtype, 1e-4)
        near = finite & ((a - b).abs() <= relative * (a.abs() + _BY_SCALE * scale))
        wrong = ~(near | (a == b) | (a.isnan() & b.isnan()))
    if not wrong.any():
        return ""
    first = tuple(map(int, wrong.nonzero()[0]))
    count = int(wrong.sum())
    return f"{count} of {wrong.numel()} values differ, at {first}: expected {expected[first]}, got {got[first]}"
