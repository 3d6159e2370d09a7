"""Compares samples of one operator: torch in eager mode, and onnxruntime on what two exporters make of them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from samples import Sample, Samples, Tensors, size_sets, value_sets
from torch.onnx._internal.exporter._registration import ONNXRegistry

from exportkit._torch_compat.loop_operators import recurrent_kernels
from exportkit._torch_compat.onnx import quiet_onnx_export
from exportkit.onnx_files.decompositions import translatable
from exportkit.onnx_files.findings import operator_findings
from exportkit.onnx_files.translate import onnx_program
from exportkit.onnx_files.translations import TRANSLATIONS

EQUAL, DIFFERS, REFUSED, CRASHED = "equal", "differs", "refused", "crashed"
NOT_TRANSLATED, NOT_TRACED = "not translated", "not traced"

# How far a result may be from torch's: so many times the largest error of torch itself, which the same computation in
# double precision shows, and so many units in the last place. Two good implementations of exp are up to four units
# apart; sums in a different order are about as far from the truth as torch's own.
_TIMES, _UNITS = 8.0, 16.0
# And so much of the largest result or input: cumulative sums have the error of their largest member, and a function of
# x may be computed as the same function at a neighbour of x. The second number holds where the operator has no double
# precision.
_OF_LARGEST, _UNKNOWN = 2.5e-7, 1e-6
# Values so large that the order of operations decides what overflows.
_EXTREMES = "extremes"


class RandomError(Exception):
    """The operator draws random numbers: there is nothing to compare."""


@dataclass
class Outcome:
    """What came of one sample with one exporter.

    Attributes:
        status: One of the words above.
        where: Names of the sets of values that are not equal, with what was seen first.
        findings: What exportkit says about the operators of the program.
    """

    status: str = EQUAL
    where: dict[str, str] = field(default_factory=dict)
    findings: tuple[str, ...] = ()


@dataclass
class Known:
    """Values for one sample and what torch returns for them.

    Attributes:
        tensors: The values.
        results: What torch returns.
        exact: The same in double precision; None where there is no such result.
        doubts: Where torch itself returns NaN or not: ``gelu(inf)`` is inf, and NaN if several elements are computed
            by one instruction, which needs contiguous tensors.
    """

    tensors: Tensors
    results: list[torch.Tensor]
    exact: Sequence[torch.Tensor | None]
    doubts: list[torch.Tensor]

    def difference(self, found: Sequence[torch.Tensor], name: str = "") -> str:
        """Returns what differs first in other results for a set of values; an empty string if nothing does."""
        rows = zip(self.results, found, self.exact, self.doubts, strict=True)
        return next(filter(None, (_difference(*row, name, self.scale) for row in rows)), "")

    @property
    def scale(self) -> float:
        """The largest finite input; integers count as far as single precision has all of them."""
        wide = [(x.double().abs(), x.is_floating_point()) for x in self.tensors if x.dtype is not torch.bool]
        known = [x[x.isfinite() if is_float else x <= 2**24] for x, is_float in wide]
        return max((float(x.max()) for x in known if x.numel()), default=0.0)


class Journal:
    """The steps of a comparison in a file, so that a step that ends the process is left out the next time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        if lines and lines[-1].startswith("begin "):
            lines.append(lines[-1].replace("begin", "crashed", 1))
            self._write(lines[-1])
        self._crashed = {line.partition(" ")[2] for line in lines if line.startswith("crashed ")}

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Runs a step, unless it ended the process before."""
        if name in self._crashed:
            raise SystemError("ended the process")
        self._write(f"begin {name}")
        try:
            yield
        finally:
            self._write(f"end {name}")

    def _write(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(line + "\n")


def compare(samples: Sequence[Sample], dtype: torch.dtype, journal: Journal) -> list[dict[str, Any]]:
    """Returns for each sample how many sets of values were run, and the outcome with each exporter.

    Samples that have no fixed result (random numbers, memory that is not initialised) or that torch refuses are left
    out. The others are exported together, and one by one where that fails.

    Args:
        samples: The samples.
        dtype: Their dtype.
        journal: Where to note the steps.
    """
    known: list[dict[str, Known]] = []
    kept = []
    for index, sample in enumerate(samples):
        with contextlib.suppress(Exception), journal.step(f"eager {index}"):
            first, second = (_known(sample, sample.tensors, seed) for seed in (0, 1))
            if not first.difference(second.results):
                kept.append(sample)
                sets = {"as given": first}
                for name, tensors in value_sets(first.tensors, dtype):
                    with contextlib.suppress(Exception), journal.step(f"eager {index} {name}"):
                        sets[name] = _known(sample, tensors)
                known.append(sets)
    plain = _Comparison("torch.onnx", kept, known, journal)
    outcomes = [plain.run(), _Comparison("exportkit", kept, known, journal, plain).run()]
    return [
        {"sample": sample.kind[:200], "sets": len(sets), **{name: vars(row[i]) for i, name in enumerate(EXPORTERS)}}
        for sample, sets, *row in zip(kept, known, *outcomes, strict=True)
    ]


def _known(sample: Sample, tensors: Tensors, seed: int = 0) -> Known:
    torch.manual_seed(seed)
    results = [_real(result) for result in sample.run([tensor.clone() for tensor in tensors])]
    doubts = [torch.zeros_like(result, dtype=torch.bool) for result in results]
    with contextlib.suppress(Exception):
        torch.manual_seed(seed)
        others = sample.run([torch.stack([tensor, tensor], -1)[..., 0] for tensor in tensors])
        doubts = [one.isnan() != _real(other).isnan() for one, other in zip(results, others, strict=True)]
    exact = None
    if any(tensor.dtype == torch.float32 for tensor in tensors):
        with contextlib.suppress(Exception):
            wide = [x.double() if x.dtype == torch.float32 else x.clone() for x in tensors]
            exact = [_real(result) for result in sample.run(wide)]
    return Known(tensors, results, exact or [None] * len(results), doubts)


def _real(result: torch.Tensor) -> torch.Tensor:
    """The tensor; complex numbers as pairs, as torch.onnx returns them."""
    result = result.detach()
    return torch.view_as_real(result.resolve_conj()) if result.is_complex() else result.clone()


class _Comparison:
    """All samples with one exporter, after those with another one, whose traced programs are used again."""

    def __init__(
        self,
        exporter: str,
        samples: list[Sample],
        known: list[dict[str, Known]],
        journal: Journal,
        before: _Comparison | None = None,
    ) -> None:
        self.exporter, self.samples, self.known, self.journal = exporter, samples, known, journal
        self.before = before
        self.outcomes = [Outcome() for _ in samples]
        self.programs: dict[tuple[int, ...], torch.export.ExportedProgram] = {}
        self.translated: dict[tuple[int, ...], torch.onnx.ONNXProgram] = {}

    def run(self) -> list[Outcome]:
        everything = tuple(range(len(self.samples)))
        if everything and not self._together(everything):
            for index in everything:
                self.outcomes[index] = Outcome()
                self._together((index,))
        return self.outcomes

    def _together(self, chosen: tuple[int, ...]) -> bool:
        """Compares samples that are exported as one model; returns False if that failed for several samples."""
        alone = len(chosen) == 1
        label = f"{self.exporter} {chosen[0] if alone else 'all'}"
        stage = NOT_TRACED
        try:
            with self.journal.step(f"{label} trace"):
                program = self._program(chosen)
            if self.before is not None and chosen in self.before.translated:
                translated = self.before.translated[chosen]
                if not _has_forms(program, translated):
                    for index in chosen:
                        self.outcomes[index] = replace(
                            self.before.outcomes[index], findings=_findings(program, translated)
                        )
                    return True
            stage = NOT_TRANSLATED
            with self.journal.step(f"{label} translate"):
                translated = EXPORTERS[self.exporter](program)
                names = [value.name for value in translated.model.graph.inputs]
                content = translated.model_proto.SerializeToString()
            stage = REFUSED
            with self.journal.step(f"{label} session"):
                session = _session(content)
        except RandomError:
            raise
        except Exception as error:
            if alone:
                status = CRASHED if isinstance(error, SystemError) else stage
                self.outcomes[chosen[0]] = Outcome(status, {"": _summary(error)})
            return alone
        findings = _findings(program, translated) if self.before is not None else ()
        for index in chosen:
            self.outcomes[index].findings = findings
        for name in dict.fromkeys(name for index in chosen for name in self.known[index]):
            rows = [self.known[index].get(name, self.known[index]["as given"]) for index in chosen]
            feeds = dict(zip(names, [tensor.numpy() for row in rows for tensor in row.tensors], strict=True))
            wanted = {value.name for value in session.get_inputs()}
            try:
                with self.journal.step(f"{label} run {name}"):
                    returned = iter(session.run(None, {key: feeds[key] for key in feeds if key in wanted}))
            except Exception as error:
                if not alone:
                    return False
                status = CRASHED if isinstance(error, SystemError) else REFUSED
                self._note(chosen[0], name, status, _summary(error))
                continue
            for index, row in zip(chosen, rows, strict=True):
                results = [torch.from_numpy(next(returned).copy()) for _ in row.results]
                if name in self.known[index]:
                    found = row.difference(results, name)
                    if found:
                        self._note(index, name, DIFFERS, found)
        self.translated[chosen] = translated
        return True

    def _program(self, chosen: tuple[int, ...]) -> torch.export.ExportedProgram:
        if self.before is not None and chosen in self.before.programs:
            return self.before.programs[chosen]
        program = _traced(Samples([self.samples[index] for index in chosen]).eval())
        if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in program.graph.nodes):
            raise RandomError
        self._add_sizes(program, chosen)
        self.programs[chosen] = program
        return program

    def _note(self, index: int, name: str, status: str, text: str) -> None:
        outcome = self.outcomes[index]
        outcome.status = status if outcome.status in (EQUAL, DIFFERS) else outcome.status
        outcome.where[name] = text if status == DIFFERS else f"{status}: {text}"

    def _add_sizes(self, program: torch.export.ExportedProgram, chosen: tuple[int, ...]) -> None:
        """Adds other sizes at which the traced program returns what the operator returns."""
        module, nodes = program.module(), [node for node in program.graph.nodes if node.op == "placeholder"]
        shapes = iter([node.meta["val"].shape for node in nodes])
        given = [self.samples[index].tensors for index in chosen]
        for place, index in enumerate(chosen):
            sample = self.samples[index]
            dynamic = [
                bool(shape) and not isinstance(shape[0], int) for _, shape in zip(given[place], shapes, strict=False)
            ]
            for name, tensors in size_sets(given[place], dynamic):
                with contextlib.suppress(Exception):
                    known = _known(sample, tensors)
                    rows = [*given[:place], tensors, *given[place + 1 :]]
                    first = sum(len(self.known[i]["as given"].results) for i in chosen[:place])
                    results = [_real(r) for r in module(*[x for row in rows for x in row])][first:][
                        : len(known.results)
                    ]
                    if not known.difference(results):
                        self.known[index][name] = known


def _traced(model: Samples) -> torch.export.ExportedProgram:
    tensors = model.tensors
    axes = tuple({0: torch.export.Dim.AUTO} if x.ndim and x.shape[0] > 1 else None for x in tensors)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(model, tensors, dynamic_shapes={"tensors": axes} if axes else None, strict=False)


def keep_registry() -> None:
    """Lets torch.onnx read its table of operators once, and not for every export: it takes most of the time."""
    known = ONNXRegistry.from_torchlib()

    def from_torchlib(_: type, opset_version: int = known.opset_version) -> ONNXRegistry:
        registry = ONNXRegistry()
        registry.functions = {target: list(functions) for target, functions in known.functions.items()}
        registry._opset_version = opset_version
        return registry

    ONNXRegistry.from_torchlib = classmethod(from_torchlib)


def _plain(program: torch.export.ExportedProgram) -> torch.onnx.ONNXProgram:
    with quiet_onnx_export():
        translated = torch.onnx.export(program, (), verbose=False)
    assert translated is not None
    return translated


EXPORTERS: dict[str, Callable[[torch.export.ExportedProgram], torch.onnx.ONNXProgram]] = {
    "torch.onnx": _plain,
    "exportkit": onnx_program,
}


def _has_forms(program: torch.export.ExportedProgram, translated: torch.onnx.ONNXProgram) -> bool:
    """Whether exportkit changes anything about what torch.onnx made of a program."""
    changed = {*TRANSLATIONS, *recurrent_kernels(), torch.ops.aten.max_pool1d.default}
    nodes = [*program.graph.nodes, *translated.exported_program.graph.nodes]
    return any(node.target in changed for node in nodes) or translatable(program) is not program


def _findings(program: torch.export.ExportedProgram, translated: torch.onnx.ONNXProgram) -> tuple[str, ...]:
    return tuple(finding.text for finding in operator_findings(program, translated))


def _session(content: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _difference(
    wanted: torch.Tensor,
    found: torch.Tensor,
    exact: torch.Tensor | None,
    doubt: torch.Tensor,
    name: str,
    scale: float,
) -> str:
    """What differs first between torch's result and another one; an empty string if nothing does."""
    if wanted.dtype != found.dtype or wanted.shape != found.shape:
        left, right = (f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in (wanted, found))
        return f"{left} / {right}"
    if not wanted.is_floating_point():
        wrong = wanted != found
    else:
        limits = torch.finfo(wanted.dtype)
        finite = wanted.isfinite() & found.isfinite()
        close = doubt | (wanted == found) | (wanted.isnan() & found.isnan())
        values = wanted.double()
        bound = _UNITS * limits.eps * values.abs() + limits.tiny
        if exact is not None and exact.shape == wanted.shape:
            exact = exact.double()
            overflow = ~wanted.isfinite() & exact.isfinite()  # an overflow on the way, which another order avoids
            error = (values - exact).abs()[wanted.isfinite() & exact.isfinite()]
            bound = bound + _TIMES * (error.max() if error.numel() else 0.0)
            close = close | overflow | (~found.isfinite() & exact.isfinite() & (name == _EXTREMES))
        largest = max(scale, float(values[finite].abs().max()) if finite.any() else 0.0)
        bound = bound + (_UNKNOWN if exact is None else _OF_LARGEST) * largest
        wrong = ~(close | (finite & ((values - found.double()).abs() <= bound)))
    if not wrong.any():
        return ""
    place = tuple(wrong.nonzero()[0].tolist())
    return f"{wanted[place].item():.9g} / {found[place].item():.9g}"


def _summary(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
