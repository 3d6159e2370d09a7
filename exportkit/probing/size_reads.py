"""What Python code reads from tensors in a run: which of them, which sizes, how it compares these, and which code runs.

Two runs of a model with the same operators may still branch on sizes in different ways: ``flag and x.shape[1] > 1000``
compares the size only if there is a flag, and runs with short inputs do not show it. Comparisons of sizes show how they
come out at other sizes; other code, such as ``math.sqrt(x.shape[1]) > 31``, is only known to have run. A trace does not
notice that code makes text of a size, such as a key of a cache, so that is noted as well.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType, MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from exportkit._torch_compat.memory import version_of
from exportkit._torch_compat.pytree import tree_leaves
from exportkit.calls.call import Call, tensors_in
from exportkit.probing.noted_sizes import SizeComparison, SizeEscaped, SizeFormatted, note_use, noted_size, plain_number
from exportkit.rewrites.branches import is_own_code, place_asking
from exportkit.rewrites.model_code import Place, is_check, is_idle, is_model_code, line_text
from exportkit.running.eager import run_eager
from exportkit.trees import flatten

Result = TypeVar("Result")

_MOST_HASHED = 2**12  # elements; larger tensors are told apart by their identity
_COMPARING = frozenset({"COMPARE_OP", "CONTAINS_OP"})
# Functions of tensors that return Python numbers; `item` and `bool` may return what a branch asks for.
_PASSING_ON = frozenset({"__contains__", "handle_torch_function"})  # functions of torch that lead to the mode
_BRANCHING = frozenset({"__bool__", "__contains__", "is_nonzero", "item"})
_ASKING = _BRANCHING | {"tolist", "__float__", "__int__", "__index__", "__complex__", "equal", "allclose", "numpy"}


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

    def compares(self) -> bool:
        """Returns whether any of these instructions compares values."""
        return any(i.opname in _COMPARING for i in dis.get_instructions(self.code) if i.offset in self.offsets)

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
        tensors = tensors_in({name: flatten(value) for name, value in values.items()})
        with Reads() as reads:
            result = run(values)
        found.update(path for path, tensor in {**tensors, **others}.items() if id(tensor) in reads.tensors)
        return result

    for call in calls:
        with contextlib.suppress(Exception):
            run_eager(model, method, call, around)
    return found


class _Questions:
    """What code asks about the values of tensors: how numbers in tensors were calculated, and from which values."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, int]] = {}
        self._numbers: dict[Any, int] = {}  # of descriptions, which hold the numbers of others
        self._answers: dict[Any, bool] = {}
        self._large: list[torch.Tensor] = []  # kept, so that each has an identity of its own

    def note(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: torch.Tensor) -> None:
        """Notes how a tensor without axes was calculated."""
        parts = [*args, *kwargs.values()]
        if not result.ndim and any(isinstance(part, torch.Tensor) for part in parts):
            calculated = (function, tuple(kwargs), *map(self._described, parts))
            self._known[id(result)] = result, self._numbers.setdefault(calculated, len(self._numbers))

    def answer(self, asked: Sequence[torch.Tensor]) -> bool | None:
        """Returns the answer to a question that was asked before; None for a new one."""
        return self._answers.get(tuple(map(self._described, asked)))

    def take(self, asked: Sequence[torch.Tensor], answer: bool) -> None:
        """Takes the answer to a question."""
        self._answers[tuple(map(self._described, asked))] = answer

    def _described(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return repr(plain_number(value))
        if id(value) in self._known:
            return self._known[id(value)][1]
        if value.numel() <= _MOST_HASHED:
            with contextlib.suppress(Exception):  # a tensor may have no values
                return tuple(value.shape), value.dtype, tuple(value.detach().flatten().tolist())
        self._large.append(value)
        return id(value), version_of(value)


class SizeReads(TorchFunctionMode):
    """Notes the sizes that code reads from tensors while it is active, what it compares them with, and which code runs.

    The code of torch is left out. A debugger does not stop while it is active.

    Args:
        forced: Which branch code takes at some places, whatever the values are; also where it asks the same again.

    Attributes:
        log: What was read and compared, in order.
        branches: Where code branches on the value of a tensor, with the outcomes. A question that was asked before
            is left out: its outcome is known.
        numbers: Where code reads numbers from tensors: file and line.
        writes: Where code writes to tensors: file and line.
    """

    def __init__(self, forced: Mapping[Place, bool] = MappingProxyType({})) -> None:
        super().__init__()
        self._forced = forced
        self.log: list[tuple[Any, ...]] = []
        self.branches: dict[Place, set[bool]] = {}
        self.numbers: set[str] = set()
        self.writes: set[str] = set()
        self._questions = _Questions()
        self._code: dict[int, Code] = {}
        self._tracers: list[Any] = []

    def __enter__(self) -> Any:
        """Begins to note."""
        self._tracers.append(sys.gettrace())
        sys.settrace(self._tracer)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Ends it."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        sys.settrace(self._tracers.pop())

    def _tracer(self, frame: FrameType, _event: str, _: Any) -> Any:
        """Returns what notes the instructions of a call of a function; None for a function that is not of the model."""
        code = frame.f_code
        if not _is_model_code(code.co_filename):
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

    def values_beyond(self, known: Sequence[SizeReads]) -> set[Place | str]:
        """Returns where code branches on values here, or reads numbers from tensors, and in no other run.

        Args:
            known: The other runs.
        """
        found: set[Place | str] = {*self.branches, *self.numbers}
        return found.difference(*((*other.branches, *other.numbers) for other in known))

    def texts(self) -> frozenset[str]:
        """Returns where text was made of sizes: file and line."""
        return frozenset([entry[0].place for entry in self.log if isinstance(entry[0], SizeFormatted)])

    def lost(self) -> frozenset[str]:
        """Returns where plain numbers were made of sizes: file and line."""
        return frozenset([entry[0].place for entry in self.log if isinstance(entry[0], SizeEscaped)])

    def comparisons(self) -> dict[SizeComparison, tuple[int, float]]:
        """Returns the comparisons with the values of both sides."""
        return {entry[0]: entry[1:] for entry in self.log if isinstance(entry[0], SizeComparison)}

    def decisions(self) -> frozenset[tuple[SizeComparison, bool]]:
        """Returns what came of the comparisons."""
        made = [entry for entry in self.log if isinstance(entry[0], SizeComparison)]
        return frozenset([(found, getattr(operator, found.operator)(left, right)) for found, left, right in made])

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns the result of a function, with sizes that note what becomes of them."""
        name, given = getattr(func, "__name__", str(func)), [*args, *(kwargs or {}).values()]
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        versions = [version_of(tensor) for tensor in tensors]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Size):
            self.log.append((name, *result))
            return torch.Size([noted_size(size, self.log) for size in result])
        if any(version_of(tensor) != version for tensor, version in zip(tensors, versions, strict=True)):
            place = _place_in_model(sys._getframe(1))
            self.writes |= {line_text(place)} if place is not None else set()
        if isinstance(result, torch.Tensor):
            self._questions.note(func, args, kwargs or {}, result)
        elif tensors and name in _ASKING:
            return self._answer(tensors, result, is_branch=type(result) is bool and name in _BRANCHING)
        elif type(result) is int:
            self.log.append((name, result))
            if name == "__len__":  # `len` returns a plain number
                note_use(SizeEscaped, self.log, past_torch=True)
            return noted_size(result, self.log)
        return result

    def _answer(self, asked: Sequence[torch.Tensor], result: Any, is_branch: bool) -> Any:
        """The Python value that code gets for tensors, which is noted."""
        place = _place_in_model(sys._getframe(2))
        if place is None or is_check(place) or is_idle(place[:2]):
            return result
        if not is_branch:
            self.numbers.add(line_text(place))
            return result
        known = self._questions.answer(asked)
        if known is not None:
            return known
        self.branches.setdefault(place, set()).add(result)
        answer = self._forced.get(place, result)
        self._questions.take(asked, answer)
        return answer


def _place_in_model(frame: FrameType) -> Place | None:
    """The place in the code of the model that calls torch; None for exportkit's own calls and other code."""
    if is_own_code(frame.f_code.co_filename):
        return None
    while frame.f_code.co_name in _PASSING_ON and frame.f_back is not None:
        frame = frame.f_back
    place = place_asking(frame)
    return place if _is_model_code(place[0]) else None


_is_model_code = functools.lru_cache(maxsize=1024)(is_model_code)


def size_reads(
    run: Callable[[], Result], forced: Mapping[Place, bool] = MappingProxyType({})
) -> tuple[SizeReads, Result] | tuple[None, None]:
    """Returns which sizes are read and which code runs while a function runs, and its result; None if it raises.

    Args:
        run: The function.
        forced: Which branch code takes at some places, whatever the values are.
    """
    found = SizeReads(forced)
    try:
        with found:
            return found, run()
    except Exception:
        return None, None
