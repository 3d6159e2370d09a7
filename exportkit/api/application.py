"""Runs an application twice, with the model and with its graphs, and says whether it does the same."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from exportkit._torch_compat.tracing import is_tracing
from exportkit.api.onnx_model import InPlace, OnnxModel, Outside
from exportkit.calls.method_wrapper import Nesting, attach
from exportkit.errors import ExportkitError, InvalidRequestError, InvalidTypeError
from exportkit.onnx_files.runner import ApplicationRun
from exportkit.plan.tables import html_lines, html_of, html_verdict
from exportkit.running.compare import Difference, compare_outputs
from exportkit.trees import flatten
from exportkit.trees.constants import text_of
from exportkit.trees.fingerprint import fingerprint

_MOST_BYTES = 2**28  # of outputs of the model that are kept to see at which call the two runs part


@dataclass(frozen=True)
class RunComparison:
    """Two runs of an application: with the model, and with graphs in its place. Prints as a short summary.

    Attributes:
        differences: What the application returned, compared: one for each tensor, image and other value.
        first_step: The first call whose outputs differ; None if none does, or it was not among those that were kept.
        steps: Number of calls of the model's method in the first run.
        inside: Number of calls that the graphs served, those of parts included.
        outside: Number of calls outside of the domain, which the model ran.
        refusal: Why the latest of these was refused.
        eager_seconds: Median duration of a call of the model's method.
        onnx_seconds: The same with the graphs.
        eager_total: Seconds of all calls of the method, or of all modules of a pipeline, together.
        onnx_total: The same with the graphs.
        methods: The methods that were called, by their paths: one, or those of several modules.
        expected: What the application returned with the model.
        got: What it returned with the graphs.
    """

    differences: tuple[Difference, ...]
    first_step: int | None
    steps: int
    inside: int
    outside: int
    refusal: ExportkitError | None
    eager_seconds: float
    onnx_seconds: float
    eager_total: float
    onnx_total: float
    methods: tuple[str, ...]
    expected: Any = field(repr=False)
    got: Any = field(repr=False)

    @property
    def equal(self) -> bool:
        """Whether the application returned the same: integers and text exactly, numbers within rounding."""
        return all(difference.reason is None for difference in self.differences)

    @property
    def row(self) -> ApplicationRun:
        """What a report says about these runs."""
        number = len(self.differences)
        equal = f"{number} values of the result are equal" if number != 1 else "the result is equal"
        calls = f"calls: {self.inside} on the graphs, {self.outside} outside of their domain"
        wrong = [f"{d.path or 'result'}: {d.reason}" for d in self.differences if d.reason is not None]
        said = wrong[:1] or [equal]
        return ApplicationRun(self.equal, "; ".join([*said, calls]), self.eager_total, self.onnx_total)

    def _repr_html_(self) -> str:
        """Returns the lines for notebooks."""
        first, *lines = str(self).splitlines()
        return html_of(html_verdict(first, self.equal), html_lines([line.strip() for line in lines]))

    def __str__(self) -> str:
        lines = [f"{'equal' if self.equal else 'DIFFERENT'}, {len(self.differences)} values compared"]
        lines += [f"  {d.path or 'result'}: {d.reason}" for d in self.differences if d.reason is not None]
        if self.first_step is not None:
            lines.append(f"call {self.first_step} of {self.steps} is the first whose outputs differ")
        lines.append(f"calls: {self.inside} on the graphs, {self.outside} outside of their domain")
        lines += [f"  {line}" for line in str(self.refusal or "").splitlines()]
        is_single = len(self.methods) == 1  # the times of several modules differ too much for a median to say anything
        eager, onnx = (self.eager_seconds, self.onnx_seconds) if is_single else (self.eager_total, self.onnx_total)
        times = f"{eager * 1e3:.3g} ms with the model, {onnx * 1e3:.3g} ms with the graphs"
        said = f"a call takes {times} (median)" if is_single else f"all calls take {times}"
        return "\n".join([*lines, f"{said}, {eager / onnx if onnx else float('nan'):.2f} times as fast"])


def compare_runs(
    run: Callable[[], Any],
    model: torch.nn.Module | object,
    onnx_model: OnnxModel,
    *,
    outside: Outside = "raise",
    seed: int = 0,
) -> RunComparison:
    """Runs an application with its model and with graphs in place of the model, and returns the comparison.

    `OnnxModel.verify` has a row for the latest comparison from then on, and `Exported.save` writes one into its report.

    Both runs begin with the same seeds of torch, numpy and ``random``, whose states are restored afterwards.

    Args:
        run: Runs the application and returns its result: tokens, text, images, arrays, or containers of them.
        model: The model that the application calls, or the pipeline or dict of several modules.
        onnx_model: The model that was exported.
        outside: What to do with calls outside of the domain; see `OnnxModel.in_place_of`.
        seed: The seed.

    Raises:
        ArgumentError: if a call is outside of the domain, and ``outside`` is "raise".
        InvalidRequestError: if the application does not call the model.
        InvalidTypeError: if ``run`` cannot be called, or ``onnx_model`` is not an `OnnxModel`.

    Example:
        >>> import tempfile, torch, exportkit
        >>> model, observer = torch.nn.Linear(4, 2), exportkit.InputObserver()
        >>> run = lambda: model(torch.rand(3, 4)).argmax(-1)
        >>> with observer(model):
        ...     _ = run()
        >>> folder = tempfile.TemporaryDirectory()
        >>> onnx_model = exportkit.export(model, observer).to_onnx(f"{folder.name}/model.onnx")
        >>> exportkit.compare_runs(run, model, onnx_model).equal
        True
    """
    _require_runnable(run, onnx_model)
    replaced = onnx_model.in_place_of(model, outside=outside)
    onnx_model.open()
    eager, onnx = Watch(), Watch()
    with seeded(seed), _attached(replaced, eager):
        expected = run()
    if not eager.seconds:
        raise InvalidRequestError(
            "The application did not call the model, so there is nothing to compare.",
            where="run",
            expected=f"a call of {' or '.join(f'{type(module).__name__}.{name}' for module, name in replaced.places)}",
            hint="pass the model that the application uses: `pipe.model`, not a copy of it.",
        )
    onnx.compared_with = eager.outputs
    with seeded(seed), replaced, _attached(replaced, onnx):
        got = run()
    compared = RunComparison(
        tuple(_differences(expected, got)),
        onnx.first_step,
        len(eager.seconds),
        replaced.inside,
        replaced.outside,
        replaced.last_refusal,
        statistics.median(eager.seconds),
        statistics.median(onnx.seconds or [0.0]),
        sum(eager.seconds),
        sum(onnx.seconds),
        tuple(one.contract.target for one in ([onnx_model] if onnx_model.graphs else onnx_model.parts.values())),
        expected,
        got,
    )
    onnx_model.compared = compared.row
    return compared


def _require_runnable(run: object, onnx_model: object) -> None:
    """Raises InvalidTypeError if there is nothing to run, or no exported model to run it on."""
    if not callable(run):
        raise InvalidTypeError(
            "The application must be a function that takes no arguments.",
            where="run",
            expected="a callable",
            got=repr(run),
        )
    if not isinstance(onnx_model, OnnxModel):
        raise InvalidTypeError(
            "The second run needs the exported model.",
            where="onnx_model",
            expected="an OnnxModel, as to_onnx, save and load return it",
            got=type(onnx_model).__name__,
        )


class Watch:
    """Listens to methods: how long each call takes, and what it returns. Calls that one of them makes do not count."""

    def __init__(self) -> None:
        self._nesting = Nesting()
        self.seconds: list[float] = []
        self.outputs: list[Mapping[str, torch.Tensor]] = []
        self.compared_with: Sequence[Mapping[str, torch.Tensor]] | None = None
        self.first_step: int | None = None
        self._bytes = 0

    def call(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs ``method(*args, **kwargs)`` and returns what it returned."""
        if self._nesting.inside or is_tracing():
            return method(*args, **kwargs)
        started = time.perf_counter()
        with self._nesting:
            result = method(*args, **kwargs)
        self.seconds.append(time.perf_counter() - started)
        if self.compared_with is None:
            self._keep(result)
        elif self.first_step is None and (step := len(self.seconds) - 1) < len(self.compared_with):
            found = compare_outputs(self.compared_with[step], flatten(result).tensors())
            self.first_step = step if any(difference.reason is not None for difference in found) else None
        return result

    def _keep(self, result: Any) -> None:
        try:
            outputs = flatten(result).tensors()
            self._bytes += sum(tensor.numel() * tensor.element_size() for tensor in outputs.values())
            if self._bytes <= _MOST_BYTES:
                self.outputs.append({path: tensor.detach().clone() for path, tensor in outputs.items()})
        except Exception:  # the application goes on; outputs are kept up to the first that cannot be
            self._bytes = _MOST_BYTES + 1


@contextlib.contextmanager
def _attached(replaced: InPlace, listener: Watch) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module, method in replaced.places:
            stack.callback(attach(module, method, listener.call).leave)
        yield


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds what applications draw from, and restores the states afterwards."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _differences(expected: Any, got: Any) -> Iterator[Difference]:
    """Compares tensors, arrays and images by their values, and everything else exactly."""
    wanted, found = _values(expected), _values(got)
    for difference in compare_outputs(wanted[0], found[0], exactly=True):
        pair = [values[0].get(difference.path) for values in (wanted, found)]
        yield difference if difference.reason is None else _at_first_token(difference, *pair)
    for path in {**wanted[1], **found[1]}:
        first, second = (fingerprint(values.get(path)) for values in (wanted[1], found[1]))
        reason = None if first == second else f"{text_of(first)} became {text_of(second)}"
        yield Difference(path, reason)


def _at_first_token(difference: Difference, expected: torch.Tensor | None, got: torch.Tensor | None) -> Difference:
    """The difference of two tensors of integers, at the first index of the last axis that differs: that of tokens."""
    if expected is None or got is None or expected.is_floating_point() or expected.ndim != got.ndim or not got.ndim:
        return difference
    if expected.shape[:-1] != got.shape[:-1]:
        return difference
    length = min(expected.shape[-1], got.shape[-1])
    steps = (expected[..., :length] != got[..., :length]).movedim(-1, 0).nonzero().tolist()
    if not steps:
        return difference
    step, *rest = steps[0]
    index = (*rest, step)
    text = f"{expected[index].item()} became {got[index].item()} at {list(index)}, the first token that differs"
    return replace(difference, reason=text, index=index)


def _values(value: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tree = flatten(value)
    tensors, others = tree.tensors(), tree.constants()
    for path, leaf in list(others.items()):
        if hasattr(leaf, "__array_interface__"):  # arrays of numpy, and images of PIL
            with contextlib.suppress(TypeError):  # elements that torch does not have, such as text
                tensors[path] = torch.from_numpy(np.array(others[path]))
                del others[path]
    return tensors, others
