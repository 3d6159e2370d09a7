"""Records module calls while they happen: what each was given before, what it returned after.

In come calls, from any number of threads; out goes the folder of a trace. The run is sacred: whatever fails in here is
kept as a problem, and each call returns or raises what it would have without us. Tensors are neither held nor changed:
each is gone through once, when it is first seen.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from exportkit._torch_compat.modules import paths_of_modules
from exportkit._torch_compat.tracing import in_backward, is_capturing, is_tracing
from exportkit.module_outputs import scope
from exportkit.module_traces.files import FORMAT, VERSION, TraceFiles, encode, quoted
from exportkit.module_traces.known import KnownTensors
from exportkit.module_traces.leaves import Layouts
from exportkit.module_traces.measure import Measured, measure, store, type_name
from exportkit.module_traces.selection import Selection
from exportkit.module_traces.statistics import Statistics

_ROOM = 512  # bytes in the header of the data file, for each module
_MOST_PROBLEMS = 20  # of which the texts are kept
_NOTHING = '"layout":null,"tensors":[],"others":[]'
_PACKAGES = ("exportkit", "torch", "transformers", "numpy")


class Frame:
    """One call that a trace records, or the block in which it does, in one thread or task and those that it starts.

    Attributes:
        collector: The recorder; None once the call has ended.
        path: Path of the module; that of the block is "".
        module: The module; None for the block.
        index: Index of the call; None for the block, and for a call that could not be recorded.
        parent: Index of the call around it.
        number: How many calls of the module were recorded before.
        entered: Whether the forward of the module has begun.
    """

    __slots__ = ("collector", "entered", "index", "module", "number", "parent", "path")

    def __init__(self, recorder: Recorder, path: str = "", module: torch.nn.Module | None = None) -> None:
        self.collector: Recorder | None = recorder
        self.path, self.module = path, module
        self.index: int | None = None
        self.parent: int | None = None
        self.number = 0
        self.entered = False


class Recorder:
    """Writes one trace.

    Args:
        model: The model.
        folder: Where to write.
        selection: Which values to store.
        without_gradients: Run the model under ``torch.no_grad()``.

    Attributes:
        problems: What is missing in the trace, as keys, so that nothing is said twice.

    Raises:
        DestinationError: if nothing can be written there.
    """

    eager: frozenset[int] = frozenset()  # nothing computes attention eagerly because of a trace

    def __init__(
        self, model: torch.nn.Module, folder: Path, selection: Selection, without_gradients: bool = False
    ) -> None:
        self._model_name = type(model).__name__
        self._selection = selection
        self._gradients = torch.no_grad if without_gradients else contextlib.nullcontext
        self._files = TraceFiles(folder, _ROOM * len(paths_of_modules(model)))
        self._lock = threading.RLock()
        self._busy: int | None = None  # the thread that is recording at this moment
        self._layouts, self._known = Layouts(), KnownTensors()
        self._written_layouts = self._tensor_count = self._call_count = 0
        self._numbers: Counter[str] = Counter()
        self._threads: dict[int, int] = {}
        self._running = 0
        self.problems: dict[str, None] = {}
        self._is_over = False
        self._waiting: list[str] = []
        self._write([encode(self._metadata())])

    def note(self, problem: str) -> None:
        """Notes that something is missing."""
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems[problem] = None

    def own_frame(self) -> Frame | None:
        """Returns the frame of this trace around the running code; None if the code belongs to other traces alone.

        Code of which nobody knows what started it belongs to every trace of the model.
        """
        frames: Any = scope.frames() or ()
        for frame in reversed(frames):
            if frame.collector is self:
                return frame  # type: ignore[no-any-return]
        if any(isinstance(frame.collector, Recorder) for frame in frames):
            return None
        return Frame(self)

    def is_deaf(self) -> bool:
        """Returns whether a call of the running code is none to record: of our own, traced, or run again."""
        if self._is_over or self._busy == threading.get_ident():
            return True
        if is_tracing() or torch.jit.is_tracing() or is_capturing():
            self.note("Calls inside of torch.compile, torch.export, torch.func, or the capture of a graph are missing.")
            return True
        return in_backward()  # checkpointed layers run again

    def record(self, call: Callable[..., Any], around: Frame, frame: Frame, /, *args: Any, **kwargs: Any) -> Any:
        """Runs ``call(*args, **kwargs)``, records it as the call of a new frame, and returns what it returned."""
        frame.index = self._guarded(self._begin, frame, around, args, kwargs)
        scope.push(frame)  # type: ignore[arg-type]
        try:
            with self._gradients():
                result = call(*args, **kwargs)
        except BaseException as error:
            self._guarded(self._end, frame, None, f"{type(error).__name__}: {error}")
            raise
        else:
            self._guarded(self._end, frame, result, None)
            return result
        finally:
            scope.pop(frame)  # type: ignore[arg-type]
            frame.collector = frame.module = None

    def finish(self) -> None:
        """Ends the recording and closes the files; of one that stopped before, as well as it can be done."""
        with self._lock:
            if self._running and not self._is_over:
                self.note(f"The ends of {self._running} calls are missing: they ran on in other threads.")
            self._is_over = True
            try:
                self._files.write_header()
                self._write([encode({"finished": True, "problems": list(self.problems)})])
            except OSError as error:
                self.note(f"The end of the recording could not be written: {error}")
            self._files.close()

    def _guarded(self, step: Callable[..., Any], *args: Any) -> Any:
        """What a step of the recording returns, or None if it fails."""
        with self._lock:
            if self._is_over:
                return None
            self._busy = threading.get_ident()
            try:
                return step(*args)
            except OSError as error:
                self._is_over = True
                self.note(f"The recording stopped, as it could not be written: {error}")
            except Exception as error:
                self.note(f"A call could not be recorded: {type(error).__name__}: {error}")
            finally:
                self._busy = None
        return None

    def _begin(self, frame: Frame, around: Frame, args: Any, kwargs: Any) -> int:
        index, path, number = self._call_count, frame.path, self._numbers[frame.path]
        self._call_count, self._numbers[path] = index + 1, number + 1
        frame.number, frame.parent = number, around.index
        lines, leaves = self._leaves({"args": args, "kwargs": kwargs}, frame)
        thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
        parent, name = "null" if frame.parent is None else frame.parent, quoted(type(frame.module).__name__)
        call = f'"begin":{index},"path":{quoted(path)},"class":{name},"number":{number},"parent":{parent}'
        self._write([*lines, f'{{{call},"thread":{thread},{leaves}}}'])
        self._running += 1
        return index

    def _end(self, frame: Frame, result: Any, error: str | None) -> None:
        if frame.index is None:  # its beginning could not be recorded
            return
        self._running -= 1
        lines, leaves = ([], _NOTHING) if error is not None else self._leaves({"outputs": result}, frame)
        lines.append(f'{{"end":{frame.index},{leaves},"error":{"null" if error is None else quoted(error)}}}')
        if frame.parent is None:
            self._write(lines)
        else:  # with the beginning of the next call, which is early enough for the case that it never ends
            self._waiting += lines

    def _leaves(self, value: dict[str, Any], frame: Frame) -> tuple[list[str], str]:
        """The lines that describe what is new in a value, and what stands for the value in the line of a call."""
        lines: list[str] = []
        try:
            return lines, self._described(value, frame, lines)
        except OSError:
            raise
        except Exception as error:
            self.note(f"What {frame.path or 'the model'} was given or returned: {type(error).__name__}: {error}")
            return lines, _NOTHING

    def _described(self, value: dict[str, Any], frame: Frame, lines: list[str]) -> str:
        layout, tensors, others = self._layouts.take_apart(value)
        if layout.number >= self._written_layouts:
            self._written_layouts = layout.number + 1
            named = {"tensors": layout.tensors, "others": layout.others, "empty": layout.empty}
            lines.append(encode({"layout": layout.number, **named}))
        wanted = self._selection(frame.path, frame.number)
        call = f"{frame.path or self._model_name}[{frame.number}]"
        numbers = [
            self._tensor(tensor, f"{call}.{place}" if wanted else None, lines)
            for tensor, place in zip(tensors, layout.tensors, strict=True)
        ]
        return f'"layout":{layout.number},"tensors":{numbers},"others":{encode(others) if others else "[]"}'

    def _tensor(self, tensor: torch.Tensor, key: str | None, lines: list[str]) -> int:
        """The number of the record of a tensor; adds the lines that make it known."""
        place = self._known.place_of(tensor)
        known = None if place is None else self._known.find(place)
        if known is not None and tensor.is_inference() and measure(tensor).hash != known.hash:
            known = None
        if known is None:
            return self._new_tensor(tensor, place, key, lines)
        shape = tuple(tensor.shape)
        number = known.numbers.get(shape)
        if number is None:
            number = known.numbers[shape] = self._next_number()
            same = next(iter(known.numbers.values()))
            lines.append(encode({"tensor": number, "as": same, "shape": shape}))
        if key is not None and known.key is None:
            known.key = key
            same = next(iter(known.numbers.values()))
            lines.append(f'{{"stored":{same},{store(tensor, self._files, key)}}}')
        return number

    def _new_tensor(self, tensor: torch.Tensor, place: Any, key: str | None, lines: list[str]) -> int:
        number, shape = self._next_number(), [] if tensor.is_nested else list(tensor.shape)
        line = f'"tensor":{number},"shape":{shape},"dtype":"{type_name(tensor)}","device":"{tensor.device}"'
        stored, measured = key is not None and not tensor.is_meta, None
        try:
            if stored:
                line += f",{store(tensor, self._files, str(key))}"
            if not stored or tensor.is_inference():  # which is found again by its hash
                measured = measure(tensor)
        except OSError:
            raise
        except Exception as error:
            self.note(f"A {tensor.dtype} tensor could not be looked into: {type(error).__name__}: {error}")
            stored, measured = False, Measured(Statistics(), "")
        if measured is not None:
            line += f",{measured.text()}"
        if place is not None:
            known = self._known.add(place, tensor, number, "" if measured is None else measured.hash)
            known.key = key if stored else None
        lines.append(f"{{{line}}}")
        return number

    def _next_number(self) -> int:
        self._tensor_count += 1
        return self._tensor_count - 1

    def _write(self, lines: list[str]) -> None:
        self._files.write_lines([*self._waiting, *lines])
        self._waiting.clear()

    def _metadata(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": self._model_name,
            "values": self._selection.text,
            "written_by": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        }


@functools.cache  # to look one up takes a millisecond
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
