"""The two runs of ``exportkit run``: a script is observed, and then runs on the graphs of its models."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from exportkit.api.application import Watch, seeded
from exportkit.api.observer import InputObserver
from exportkit.api.onnx_model import InPlace, OnnxModel
from exportkit.api.script import Script, ScriptRun, owner_of
from exportkit.calls.application import named_targets
from exportkit.calls.method_wrapper import attach
from exportkit.errors import InvalidRequestError, described


@dataclass(frozen=True)
class ObservedScript:
    """The first run of a script.

    Attributes:
        script: The script.
        run: Its outcome.
        observer: What the models were called with.
        watches: How long the calls took and what they returned, by the name of the part; without those of a pipeline,
            whose methods are only known afterwards.
    """

    script: Script
    run: ScriptRun
    observer: InputObserver
    watches: Mapping[str, Watch]

    @property
    def application(self) -> Any:
        """The model that was named, or all that were found, by name."""
        return owner_of(self.run.found[""]) if self.script.observed is not None else dict(self.run.found)


def observe_script(script: Script) -> ObservedScript:
    """Runs a script, records the calls of its models, and returns both."""
    observers, watches = [InputObserver()], dict[str, Watch]()
    latest: list[Any] = []

    def enter(name: str, found: Any) -> contextlib.AbstractContextManager[Any]:
        model = owner_of(found)
        if script.observed is not None and all(model is not one for one in latest):  # the variable was rebound
            observers.append(InputObserver())
            watches.clear()
            latest[:] = [model]
        method = found.__name__ if isinstance(found, MethodType) else "forward"
        if isinstance(model, torch.nn.Module):
            places = {name: (model, method)}
        else:
            named = named_targets(model) if isinstance(model, Mapping) else {}
            places = {target.path: (module, target.method) for target, module in named.items()}
        with contextlib.ExitStack() as stack:
            for path, place in places.items():
                stack.callback(attach(*place, watches.setdefault(path, Watch()).call).leave)
            stack.enter_context(observers[-1]({name: model} if script.observed is None else model, method_name=method))
            return stack.pop_all()

    with seeded(0):
        run = script.run(enter)
    return ObservedScript(script, run, observers[-1], watches)


@dataclass(frozen=True)
class RunOnGraphs:
    """The run of a script on graphs, compared with its first run.

    Attributes:
        run: Its outcome.
        problems: What is not as it was, a sentence each; the text that the script printed does not count.
        calls: How many calls the graphs served.
        seconds: How long they took together.
        first_seconds: How long the first call of each part took, together.
    """

    run: ScriptRun
    problems: tuple[str, ...]
    calls: int
    seconds: float
    first_seconds: float


def run_on_graphs(first: ObservedScript, onnx_model: OnnxModel) -> RunOnGraphs:
    """Runs a script again, with graphs in place of its models, and compares both runs.

    Args:
        first: Its first run.
        onnx_model: Its models.
    """
    script, places, watches = first.script, list[InPlace](), dict[str, Watch]()
    latest: list[Any] = []
    parts = {name: part.observation for name, part in first.observer.parts.items()}
    observations = parts if first.observer.has_only_parts else {"": first.observer.observation}

    def enter(name: str, found: Any) -> contextlib.AbstractContextManager[Any]:
        graphs, application = onnx_model, owner_of(found)
        if script.observed is not None and all(application is not one for one in latest):
            places.clear()
            watches.clear()
            latest[:] = [application]
        if script.observed is None:
            if name not in onnx_model.parts:
                return contextlib.nullcontext()
            graphs, application = OnnxModel.of(onnx_model.parts[name]), {name: found}
        try:
            in_place = graphs.in_place_of(application, outside="eager")
        except InvalidRequestError:  # the graph keeps a state from call to call
            in_place = graphs.in_place_of(application)
        names = [name] if script.observed is None or onnx_model.graphs else list(onnx_model.parts)
        places.append(in_place)
        with contextlib.ExitStack() as stack:
            stack.enter_context(in_place)
            for part, place in zip(names, in_place.places, strict=True):
                watch = watches.setdefault(part, Watch())
                if place[1] == observations[part].method_name:  # not with the hooks of the module around it
                    recorded = [call.outputs.tensors() for call in observations[part].calls]
                    watch.compared_with = first.watches[part].outputs if part in first.watches else recorded
                stack.callback(attach(*place, watch.call).leave)
            return stack.pop_all()

    onnx_model.open()
    with seeded(0):
        run = script.run(enter, quiet=True)
    took = [watch.seconds for watch in watches.values() if watch.seconds]
    return RunOnGraphs(
        run,
        tuple(_problems(first, run, places, watches)),
        sum(place.inside for place in places),
        sum(sum(part) for part in took),
        sum(part[0] for part in took),
    )


def _problems(
    first: ObservedScript, run: ScriptRun, places: Sequence[InPlace], watches: Mapping[str, Watch]
) -> list[str]:
    """What is not as it was in the first run, a sentence each."""
    calls, outside = sum(place.inside for place in places), sum(place.outside for place in places)
    problems = [*run.problems]
    if run.error is not None:
        problems.append(f"the script fails: {described(run.error)}".partition("\n")[0])
    elif run.exit_code:
        problems.append(f"the script exits with {run.exit_code}")
    if not calls:
        problems.append("no call reached the graphs")
    if outside:
        refusal = next(str(place.last_refusal) for place in places if place.last_refusal is not None)
        problems.append(f"{outside} of {calls + outside} calls are outside of the domain: {' '.join(refusal.split())}")
    for name, watch in watches.items():
        of = f" of {name}" if name else ""
        before = first.watches.get(name)
        if watch.first_step is not None:
            problems.append(f"call {watch.first_step}{of} returns a different result")
        elif before is not None and len(before.seconds) != len(watch.seconds):
            problems.append(f"{len(watch.seconds)} calls{of} instead of {len(before.seconds)}")
    return problems
