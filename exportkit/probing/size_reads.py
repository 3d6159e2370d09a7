"""What Python code reads from tensors in a run: which of them, which sizes, how it compares these, and which code runs.

Two runs of a model with the same operators may still decide by sizes in different ways: ``flag and x.shape[1] > 1000``
asks only if there is a flag, and runs with short inputs do not show it. Comparisons of sizes show how they come out at
other sizes; other code, such as ``math.sqrt(x.shape[1]) > 31``, is only known to have run. A trace does not notice that
code makes text of a size, such as a key of a cache, so that is noted, too.
"""

from __future__ import annotations

import contextlib
import dis
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from exportkit._torch_compat.pytree import tree_leaves
from exportkit.calls.call import Call
from exportkit.running.eager import run_eager
from exportkit.trees import flatten, join

_OWN = f"{Path(__file__).parents[1]}{os.sep}"  # what exportkit compares on its way to the model is left out
_NOT_THE_MODELS = (_OWN, f"{Path(torch.__file__).parent}{os.sep}")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_ARITHMETIC = ("add", "sub", "mul", "floordiv", "mod")


class SizeComparison(NamedTuple):
    """A comparison of a size, or of a number that is calculated from sizes.

    Attributes:
        place: Where it is: file, line, and position in the code of the function.
        operator: Its name, such as ``lt``.
        limit: The right side, if it does not come from sizes.
    """

    place: tuple[str, int, int]
    operator: str
    limit: float | None


class Text(NamedTuple):
    """Code that makes text of a size.

    Attributes:
        place: File and line.
    """

    place: str


class Code(NamedTuple):
    """Instructions of a function that ran.

    Attributes:
        code: The function.
        offsets: Where the instructions are in it.
    """

    code: CodeType
    offsets: set[int]

    def place(self) -> str:
        """Returns file and line of the first instruction."""
        first = min(self.offsets)
        found = [line for start, end, line in self.code.co_lines() if start <= first < end]
        return f"{self.code.co_filename}:{found[0] if found else self.code.co_firstlineno}"

    def numbers(self) -> Iterator[int]:
        """Yields the integers that these instructions load, also those in tuples and sets of constants."""
        for instruction in dis.get_instructions(self.code):
            if instruction.offset in self.offsets and instruction.opcode in dis.hasconst:
                value = instruction.argval
                for number in value if isinstance(value, tuple | frozenset) else (value,):
                    if type(number) is int:
                        yield number


class Reads(TorchFunctionMode):
    """Notes the names of the methods and attributes of tensors that Python code reads, and the identities of these."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.tensors: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tensors.update(map(id, tree_leaves((args, kwargs))))
        name = getattr(func, "__name__", "")
        self.found.add(getattr(func.__self__, "__name__", "") if name == "__get__" else name)  # of a property
        return func(*args, **(kwargs or {}))


def tensors_read(
    model: torch.nn.Module,
    method: str,
    calls: Iterable[Call],
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> set[str]:
    """Returns the paths of the tensors that code calculates with in some call, or whose shape it reads.

    Args:
        model: The model.
        method: The method.
        calls: The calls; the model may raise for some of them.
        others: Other tensors than the arguments, by path, such as those on modules.
    """
    found: set[str] = set()

    def around(values: dict[str, Any], run: Callable[[Mapping[str, Any]], Any]) -> Any:
        trees = {name: flatten(value) for name, value in values.items()}
        tensors = {join(name, path): tensor for name, tree in trees.items() for path, tensor in tree.tensors().items()}
        with Reads() as reads:
            result = run(values)
        found.update(path for path, tensor in {**tensors, **others}.items() if id(tensor) in reads.tensors)
        return result

    for call in calls:
        with contextlib.suppress(Exception):
            run_eager(model, method, call, around)
    return found


class SizeReads(TorchFunctionMode):
    """Notes the sizes that code reads from tensors while it is active, and what it compares them with.

    Args:
        with_code: Also note which code runs, apart from that of torch; a debugger does not stop there meanwhile.

    Attributes:
        log: What was read and compared, in order.
    """

    def __init__(self, with_code: bool = False) -> None:
        super().__init__()
        self._with_code = with_code
        self.log: list[tuple[Any, ...]] = []
        self._code: dict[int, Code] = {}
        self._tracers: list[Any] = []

    def __enter__(self) -> Any:
        """Begins to note."""
        if self._with_code:
            self._tracers.append(sys.gettrace())
            sys.settrace(self._tracer)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Ends it."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._with_code:
            sys.settrace(self._tracers.pop())

    def _tracer(self, frame: FrameType, _event: str, _: Any) -> Any:
        """Returns what notes the instructions of a call of a function; None for a function that is not of the model."""
        code = frame.f_code
        if code.co_filename.startswith(_NOT_THE_MODELS):
            return None
        add = self._code.setdefault(id(code), Code(code, set())).offsets.add
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def noting(frame: FrameType, event: str, _: Any) -> Any:
            if event == "opcode":
                add(frame.f_lasti)
            return noting

        return noting

    def code_beyond(self, known: Sequence[SizeReads]) -> list[Code]:
        """Returns the code that ran here, and in no other run.

        Args:
            known: The other runs.
        """
        found = []
        for key, (code, offsets) in self._code.items():
            own = offsets.difference(*(other._code[key].offsets for other in known if key in other._code))
            if own:
                found.append(Code(code, own))
        return found

    def texts(self) -> frozenset[str]:
        """Returns where text was made of sizes: file and line."""
        return frozenset([entry[0].place for entry in self.log if isinstance(entry[0], Text)])

    def comparisons(self) -> dict[SizeComparison, tuple[int, float]]:
        """Returns the comparisons with the values of both sides."""
        return {entry[0]: entry[1:] for entry in self.log if isinstance(entry[0], SizeComparison)}

    def decisions(self) -> frozenset[tuple[SizeComparison, bool]]:
        """Returns what came of the comparisons."""
        made = [entry for entry in self.log if isinstance(entry[0], SizeComparison)]
        return frozenset([(found, getattr(operator, found.operator)(left, right)) for found, left, right in made])

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns the result of a function, with sizes that note what becomes of them."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        if isinstance(result, torch.Size):
            self.log.append((name, *result))
            return torch.Size([_Size.of(size, self.log) for size in result])
        if type(result) is int:
            self.log.append((name, result))
            return _Size.of(result, self.log)
        return result


def size_reads(run: Callable[[], Any]) -> SizeReads | None:
    """Returns which sizes are read and which code runs while a function runs; None if it raises."""
    found = SizeReads(with_code=True)
    try:
        with found:
            run()
    except Exception:
        return None
    return found


class _Size(int):
    """A size that notes how it is compared, and so do numbers that are calculated from it."""

    log: list[tuple[Any, ...]]

    @classmethod
    def of(cls, value: int, log: list[tuple[Any, ...]]) -> _Size:
        found = cls(value)
        found.log = log
        return found

    def __bool__(self) -> bool:
        self.note("ne", 0)
        return int(self) != 0

    def note(self, name: str, other: Any) -> None:
        """Notes that the caller of the caller compares this size."""
        frame = sys._getframe(2)
        place = (frame.f_code.co_filename, frame.f_lineno, frame.f_lasti)
        if not place[0].startswith(_OWN):
            plain = int(other) if isinstance(other, int) else other
            comparison = SizeComparison(place, name, None if isinstance(other, _Size) else plain)
            self.log.append((comparison, int(self), plain))

    def __repr__(self) -> str:
        self._note_text()
        return int.__repr__(self)

    def __format__(self, spec: str) -> str:
        self._note_text()
        return format(int(self), spec)

    def _note_text(self) -> None:
        frame = sys._getframe(2)
        if not frame.f_code.co_filename.startswith(_NOT_THE_MODELS):
            self.log.append((Text(f"{frame.f_code.co_filename}:{frame.f_lineno}"),))

    def __float__(self) -> float:
        self.log.append(("float", int(self)))
        return float(int(self))

    def __neg__(self) -> int:
        return _Size.of(-int(self), self.log)

    __hash__ = int.__hash__


def _comparing(name: str) -> Callable[[_Size, Any], Any]:
    compare = getattr(operator, name)

    def compared(self: _Size, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        self.note(name, other)
        return compare(int(self), int(other) if isinstance(other, int) else other)

    return compared


def _calculating(name: str, reflected: bool) -> Callable[[_Size, Any], Any]:
    calculate = getattr(operator, name)

    def calculated(self: _Size, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        values = (int(other), int(self)) if reflected else (int(self), int(other))
        return _Size.of(calculate(*values), self.log)

    return calculated


for _name in _COMPARISONS:
    setattr(_Size, f"__{_name}__", _comparing(_name))
for _name in _ARITHMETIC:
    setattr(_Size, f"__{_name}__", _calculating(_name, False))
    setattr(_Size, f"__r{_name}__", _calculating(_name, True))
