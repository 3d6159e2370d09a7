"""OnnxPrograms: several graphs of one model, called like the model: each call goes to the graph that it fits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exportkit.errors import ArgumentError, ExportkitError
from exportkit.onnx_files.onnx_model import OnnxModel
from exportkit.programs.clusters import Shapes, constants_of, shapes_of
from exportkit.programs.stateful import StatefulOnnxModel
from exportkit.trees import flatten

if TYPE_CHECKING:
    from exportkit.plan.plan import Plan
    from exportkit.programs.programs import Split
    from exportkit.proof.report import Report


class OnnxPrograms:
    """ONNX graphs with the calling convention of the model, each for calls of one kind.

    Args:
        programs: The graphs by name.
        split: Why there are several, and which calls each is for.
        digests: SHA-256 of each file by path, where they were read from a folder.
    """

    def __init__(
        self, programs: Mapping[str, OnnxModel], split: Split, digests: Mapping[Path, str] | None = None
    ) -> None:
        self.programs, self.split, self.digests = dict(programs), split, dict(digests or {})

    def __repr__(self) -> str:
        return f"OnnxPrograms({', '.join(f'{name}: {p.path.name}' for name, p in self.programs.items())})"

    @property
    def path(self) -> Path:
        """The folder with the ONNX files."""
        return next(iter(self.programs.values())).path.parent

    @property
    def size(self) -> int:
        """Bytes on disk, weights included."""
        return sum(program.size for program in self.programs.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model returns, computed by the graph that the call fits, in onnxruntime.

        Arguments are given as to the model; see `OnnxModel`.

        Raises:
            ArgumentError: if the call fits no graph.
            RuntimeFailure: if onnxruntime refuses it.
        """
        signature = next(iter(self.programs.values())).exported.observation.signature
        trees = {name: flatten(value) for name, value in signature.bind(args, kwargs).items()}
        kind = self.split.landmarks.kind(shapes_of(trees), constants_of(trees))
        refused: dict[str, ExportkitError] = {}
        for name in sorted(self.programs, key=lambda name: self.split.kinds[name] != kind):
            try:
                _check_range(self.programs[name].exported.plan, shapes_of(trees))
                return self._run(self.programs[name], args, kwargs)
            except ArgumentError as error:
                refused[name] = error
        raise _no_program(refused, shapes_of(trees))

    def verify(self, unseen: bool = True) -> Report:
        """Returns the proof: a row for each recorded call, and as its parts the proof of each graph.

        Args:
            unseen: Also try sizes that were not recorded, as `OnnxModel.verify` does.

        Raises:
            DestinationError: if a file of the folder that this was loaded from is another one than was saved.
        """
        from exportkit.proof.prove import verify_programs

        return verify_programs(self, unseen=unseen)

    def _run(self, program: OnnxModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        returned = program(*args, **kwargs)
        if isinstance(program, StatefulOnnxModel):  # they remember one state, that of the model
            for other in self.programs.values():
                vars(other)["module_state"] = program.module_state
        return returned


def _check_range(plan: Plan, shapes: Shapes) -> None:
    """Raises ArgumentError if a size is out of the range that its variable has."""
    for leaf in plan.leaves:
        for size, have in zip(leaf.sizes, shapes.get(leaf.path, ()), strict=False):
            if size.variable is None:
                continue
            variable = plan.variable(size.variable)
            if have < variable.minimum or (variable.maximum is not None and have > variable.maximum):
                most = "" if variable.maximum is None else f" and at most {variable.maximum}"
                raise ArgumentError(
                    "An input is out of range.",
                    where=leaf.path,
                    expected=f"{variable.name} at least {variable.minimum}{most}",
                    got=have,
                )


def _no_program(refused: Mapping[str, Exception], shapes: Shapes) -> ArgumentError:
    reasons = [f"{name}: {_short(error)}" for name, error in refused.items()]
    return ArgumentError(
        "No program fits this call.",
        where=", ".join(f"{path} {shape}" for path, shape in shapes.items()),
        expected="a call like those that were recorded",
        got=f"\n{' ' * 7}".join(reasons),
        hint="observe a call like this one too, then export again.",
    )


def _short(error: Exception) -> str:
    """What is wrong with a call, in one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if not line.startswith("hint: "))[:200]
