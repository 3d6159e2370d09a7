"""Takes a case from the recording to the graph, and says what became of it; the same for torch.onnx.export."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from cases import Case, Sizes
from torch.onnx.errors import OnnxExporterError
from torch.overrides import TorchFunctionMode

import exportkit
from exportkit.errors import ArgumentError
from tests.trust.judge import differences

# The verdicts: proven and right; the same, but other runs are refused; an error, or not proven; proven and wrong; and a
# case that does not run in eager mode.
PASS, LIMITED, LOUD, SILENT, NOT_BUILT = "pass", "limited", "loud", "silent", "not built"
WRONG = "wrong"  # torch.onnx.export says nothing about its graph: it is right, wrong, or there is an error
# Models here are up to dozens of layers deep: their rounding errors add up to more than those of a single operator.
_SLACK = 10.0


class _FirstOfEqual(TorchFunctionMode):
    """Sorts are stable, and so top-k takes the first of equal values, as in onnxruntime. torch leaves both open."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        match getattr(func, "__name__", ""):
            case "topk":
                return _topk(*args, **kwargs)
            case "sort" | "argsort" as name if "out" not in kwargs and kwargs.pop("stable", None) in (None, False):
                return _sort(*args, **kwargs)[1 if name == "argsort" else slice(None)]
        return func(*args, **kwargs)


def _sort(values: torch.Tensor, dim: int = -1, descending: bool = False) -> Any:
    return values.sort(dim=dim, descending=descending, stable=True)


def _topk(values: torch.Tensor, k: int, dim: int = -1, largest: bool = True, **_: Any) -> Any:
    ordered = _sort(values, dim, largest)
    return torch.return_types.topk([part.narrow(dim, 0, k) for part in ordered])


@dataclass
class Call:
    """One call of the observed method in eager mode.

    Attributes:
        sizes: The sizes of the run.
        args: Its positional arguments.
        kwargs: Its named arguments.
        run: The method.
        result: What it returned.
    """

    sizes: Sizes
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    run: Callable[..., Any]
    result: Any = None

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments, to be changed freely."""
        return _copied(self.args, self.kwargs)

    def difference(self, result: Any) -> str:
        """Returns how another result differs, or nothing."""
        found = self._difference(self.result, result)
        if found:
            args, kwargs = self.arguments()
            with torch.no_grad(), _FirstOfEqual():
                other = self.run(*args, **kwargs)
            found = found if self._difference(other, result) else ""
        return found

    def _difference(self, expected: Any, got: Any) -> str:
        pair = (_without_padding(value, self.kwargs.get("attention_mask")) for value in (expected, got))
        return next(differences(*pair, _SLACK), "")


@dataclass
class Built:
    """A case that runs in eager mode.

    Attributes:
        model: The model.
        use: Runs it at given sizes.
        recorded: The calls of the runs that are observed.
        truth: The calls of the other runs.
    """

    model: torch.nn.Module
    use: Callable[..., object]
    recorded: list[Call]
    truth: list[Call]


def judge(case: Case, runtime: Literal["onnxruntime"] | None = None) -> dict[str, Any]:
    """Returns the verdict on what exportkit makes of a case, with its reason, in plain values.

    Args:
        case: The case.
        runtime: What the graphs are fused for; without one, they are portable.
    """
    return _row(case, functools.partial(_judged, runtime=runtime))


def judge_plain(case: Case) -> dict[str, Any]:
    """Returns the same for torch.onnx.export, with every axis dynamic where torch allows it."""
    return _row(case, _plain)


def _row(case: Case, judged: Callable[[Case, Built, dict[str, float]], dict[str, Any]]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seconds: dict[str, float] = {}
    row: dict[str, Any] = {"name": case.name, "family": case.family, "seconds": seconds}
    try:
        with _timed(seconds, "eager"):
            torch.manual_seed(0)
            model, use = case.make()
            model = model.eval()
            built = Built(model, use, *(_calls(model, case.method, use, runs) for runs in (case.recorded, case.truth)))
    except Exception as error:
        traceback.print_exc()
        return row | {"verdict": NOT_BUILT, "reason": _line(error)}
    try:
        return row | judged(case, built, seconds)
    except Exception as error:
        traceback.print_exc()
        return row | {"verdict": LOUD, "reason": _line(error)}


def _judged(
    case: Case, built: Built, seconds: dict[str, float], runtime: Literal["onnxruntime"] | None
) -> dict[str, Any]:
    observer = exportkit.InputObserver()
    with observer(built.model, store_n_calls=len(built.recorded), method_name=case.method):
        _run(built.use, case.recorded)
    with tempfile.TemporaryDirectory(prefix="coverage-") as folder:
        with _timed(seconds, "export"):
            exported = exportkit.export(built.model, observer)
        with _timed(seconds, "translate"):
            graph = exported.to_onnx(Path(folder) / "model.onnx", runtime=runtime)
        with _timed(seconds, "prove"):
            report = graph.verify()
        print(report)
        wrong, refused, failed = _compared(graph, built.recorded + built.truth)
    if not report.ok:
        return {"verdict": LOUD, "reason": _short(report.verdict()), "wrong": wrong}
    if wrong:
        return {"verdict": SILENT, "reason": wrong[0], "wrong": wrong}
    failed += [reason for sizes, reason in refused if sizes in case.recorded]
    if failed:
        return {"verdict": LOUD, "reason": f"proven, but {failed[0]}"}
    reasons = [reason for _, reason in refused]
    return {"verdict": LIMITED if refused else PASS, "reason": reasons[0] if refused else "", "refused": reasons}


def _compared(graph: Any, calls: Sequence[Call]) -> tuple[list[str], list[tuple[Sizes, str]], list[str]]:
    """What is wrong, refused with its sizes, and what raised in another way, a line each."""
    wrong, refused, failed = [], [], []
    for call in calls:
        args, kwargs = call.arguments()
        try:
            difference = call.difference(graph(*args, **kwargs))
        except ArgumentError as error:
            refused.append((call.sizes, f"{call.sizes}: {_line(error)}"))
        except Exception as error:
            failed.append(f"{call.sizes}: {_line(error)}")
        else:
            wrong += [f"{call.sizes}: {difference}"] if difference else []
    return wrong, refused, failed


def _copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of arguments, with the attributes that a class leaves out when it is copied, as BatchEncoding does."""
    copied = copy.deepcopy((args, kwargs))
    for value, made in zip([*args, *kwargs.values()], [*copied[0], *copied[1].values()], strict=True):
        for name in getattr(value, "__dict__", {}).keys() - getattr(made, "__dict__", {}).keys():
            setattr(made, name, copy.deepcopy(getattr(value, name)))
    return copied


def _calls(model: torch.nn.Module, method: str, use: Callable[..., object], runs: Sequence[Sizes]) -> list[Call]:
    """The calls of the method during the runs, with copies of their arguments and results."""
    found: list[Call] = []
    original = getattr(model, method)

    @functools.wraps(original)
    def recording(*args: Any, **kwargs: Any) -> Any:
        call = Call(sizes, *_copied(args, kwargs), original)
        result = original(*args, **kwargs)
        call.result = copy.deepcopy(result)
        found.append(call)
        return result

    setattr(model, method, recording)
    try:
        for sizes in runs:
            _run(use, [sizes])
    finally:
        delattr(model, method)
    return found


def _run(use: Callable[..., object], runs: Sequence[Sizes]) -> None:
    with torch.no_grad():
        for sizes in runs:
            torch.manual_seed(zlib.crc32(repr(sizes).encode()))
            use(*sizes)


def _plain(case: Case, built: Built, seconds: dict[str, float]) -> dict[str, Any]:
    model = built.model
    if case.method != "forward":
        model.forward = getattr(model, case.method)
    args, kwargs = built.recorded[0].arguments()
    by_name = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    with _timed(seconds, "torch.onnx"), torch.no_grad():
        shapes = torch.utils._pytree.tree_map(_axes, by_name)
        program = torch.onnx.export(model, args, kwargs=kwargs, dynamo=True, dynamic_shapes=shapes, verbose=False)
    errors = []
    for call in built.recorded + built.truth:
        args, kwargs = call.arguments()
        try:
            result = program(*args, **kwargs)
        except Exception as error:
            errors.append(f"{call.sizes}: {_line(error)}")
            continue
        expected = [leaf for leaf in torch.utils._pytree.tree_leaves(call.result) if isinstance(leaf, torch.Tensor)]
        if difference := next(differences(expected, list(result), _SLACK), ""):
            return {"verdict": WRONG, "reason": f"{call.sizes}: {difference}"}
    return {"verdict": LOUD, "reason": errors[0]} if errors else {"verdict": PASS, "reason": ""}


def _axes(value: Any) -> Any:
    return dict.fromkeys(range(value.ndim), torch.export.Dim.AUTO) if isinstance(value, torch.Tensor) else None


def _without_padding(value: Any, mask: Any) -> Any:
    """The value with zeros where a mask with padding hides a position: what a model returns there is arbitrary."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or bool(mask.all()):
        return value
    rows, length = mask.shape

    def hidden(leaf: Any) -> Any:
        if leaf.ndim < 2 or leaf.shape[0] != rows:
            return leaf
        axis = 2 if leaf.ndim == 4 else 1
        if not 1 < leaf.shape[axis] <= length:
            return leaf
        shape = [rows, *([1] * (leaf.ndim - 1))]
        shape[axis] = leaf.shape[axis]
        return leaf.masked_fill(~mask[:, length - leaf.shape[axis] :].bool().reshape(shape), 0)

    return _with_tensors(value, hidden)


def _with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The value with other tensors; caches become lists of what their layers hold."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _with_tensors(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_with_tensors(part, change) for part in value]
    names = ("self_attention_cache", "cross_attention_cache", "layers", "keys", "values")
    parts = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return _with_tensors(parts, change) if parts else value


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.process_time()
    yield
    seconds[name] = round(time.process_time() - started, 1)


def _line(error: BaseException) -> str:
    while isinstance(error, OnnxExporterError) and error.__cause__:
        error = error.__cause__
    return _short(f"{type(error).__name__}: {error}")


def _short(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()[:700]
