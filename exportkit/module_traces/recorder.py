"""Records module calls while they happen: the arguments of each call before it, and what it returned after.

Calls may come from any number of threads. The run has priority: whatever fails here is noted as a problem, and each
call returns or raises what it would without the recording. Tensors are neither held nor changed: each is read once,
when it is first seen.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exportkit._torch_compat.memory import StorageRef, memory_state
from exportkit._torch_compat.modules import paths_of_modules
from exportkit._torch_compat.tracing import in_backward, is_capturing, is_tracing
from exportkit.errors import described
from exportkit.files import versions
from exportkit.module_outputs import scope
from exportkit.module_traces.files import FORMAT, VERSION, TraceFiles, encode, quoted
from exportkit.module_traces.leaves import LeafReader
from exportkit.module_traces.measure import Statistics, TensorStatistics, measure, store
from exportkit.trees.tree import dtype_name

_ROOM = 512  # bytes for each module in the header of the data file: about four stored tensors, with their names
_MOST_PROBLEMS = 20  # whose texts are kept: the rest of a run that fails everywhere says the same
_FIRST_CLEANING = 4096  # tensors seen; then whenever there are twice as many as were alive the last time
_NOTHING = '"layout":null,"tensors":[],"others":[]'
_PACKAGES = ("exportkit", "torch", "transformers", "numpy")


class CallFrame:
    """One call that a trace records, or the ``with`` block, in one thread or task and those that it starts.

    Attributes:
        collector: The recorder; None after the end of the call.
        path: Path of the module; "" for the block.
        module: The module; None for the block.
        index: Index of the call; None for the block, and for a call that could not be recorded.
        parent: Index of the call around it.
        number: How many calls of the module were recorded before.
        entered: Whether the forward of the module has begun.
    """

    __slots__ = ("collector", "entered", "index", "module", "number", "parent", "path")

    def __init__(self, recorder: TraceRecorder, path: str = "", module: torch.nn.Module | None = None) -> None:
        self.collector: TraceRecorder | None = recorder
        self.path, self.module = path, module
        self.index: int | None = None
        self.parent: int | None = None
        self.number = 0
        self.entered = False


class TraceRecorder:
    """Writes one trace.

    Args:
        model: The model.
        folder: Where to write.
        selection: Says whether the values of a call are stored, given the path of its module and its number.
        values: What the user asked for, for the metadata.
        without_gradients: Run the model under ``torch.no_grad()``.

    Attributes:
        problems: What is missing in the trace, as keys, so that each problem is kept once.

    Raises:
        DestinationError: if nothing can be written there.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        folder: Path,
        selection: Callable[[str, int], bool],
        values: str | None,
        without_gradients: bool = False,
    ) -> None:
        self._model_name = type(model).__name__
        self._selection = selection
        self._gradients = torch.no_grad if without_gradients else contextlib.nullcontext
        self._files = TraceFiles(folder, _ROOM * len(paths_of_modules(model)))
        self._lock = threading.RLock()
        self._busy: int | None = None  # the thread that is recording at this moment
        self._leaf_reader = LeafReader()
        self._seen: dict[Any, SeenTensor] = {}  # by identity; the tensors themselves are not held
        self._clean_at = _FIRST_CLEANING
        self._written_layouts = self._call_count = 0
        self._tensor_numbers = itertools.count()
        self._numbers: Counter[str] = Counter()
        self._threads: dict[int, int] = {}
        self._running = 0
        self.problems: dict[str, None] = {}
        self._is_over = False
        self._waiting: list[str] = []
        metadata = {
            "format": FORMAT,
            "version": VERSION,
            "model": self._model_name,
            "values": values,
            "written_by": versions(*_PACKAGES),
        }
        self._write([encode(metadata)])

    def note(self, problem: str) -> None:
        """Notes that something is missing."""
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems[problem] = None

    def own_frame(self) -> CallFrame | None:
        """Returns the frame of this trace around the running code; None if the code belongs to other traces only.

        Code in a thread whose origin is not known belongs to every trace of the model.
        """
        frames: Any = scope.frames() or ()
        for frame in reversed(frames):
            if frame.collector is self:
                found: CallFrame = frame
                return found
        if any(isinstance(frame.collector, TraceRecorder) for frame in frames):
            return None
        return CallFrame(self)

    def is_ignoring(self) -> bool:
        """Returns whether calls of the running code are not recorded: our own, traced ones, and those run again."""
        if self._is_over or self._busy == threading.get_ident():
            return True
        is_jit: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if is_jit or is_tracing() or is_capturing():
            self.note("Calls inside torch.compile, torch.export, torch.func, or the capture of a graph are missing.")
            return True
        return in_backward()  # checkpointed layers run again

    def record(
        self, call: Callable[..., Any], around: CallFrame, frame: CallFrame, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Runs ``call(*args, **kwargs)``, records it as the call of a new frame, and returns what it returned."""
        frame.index = self._guarded(self._begin, frame, around, args, kwargs)
        scope.push(frame)
        try:
            with self._gradients():
                result = call(*args, **kwargs)
        except BaseException as error:
            self._guarded(self._end, frame, None, described(error))
            raise
        else:
            self._guarded(self._end, frame, result, None)
            return result
        finally:
            scope.pop(frame)
            frame.collector = frame.module = None

    def finish(self) -> None:
        """Ends the recording and closes the files; after an error on disk, as far as possible."""
        with self._lock:
            if self._running and not self._is_over:
                self.note(f"The ends of {self._running} calls are missing: they continued in other threads.")
            self._is_over = True
            try:
                self._files.write_header()
                self._write([encode({"finished": True, "problems": list(self.problems)})])
            except OSError as error:
                self.note(f"The end of the recording could not be written: {error}")
            self._files.close()

    def _guarded(self, step: Callable[..., Any], *args: Any) -> Any:
        """Runs a step of the recording and returns its result, or None if it fails."""
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
                self.note(f"A call could not be recorded: {described(error)}")
            finally:
                self._busy = None
        return None

    def _begin(self, frame: CallFrame, around: CallFrame, args: Any, kwargs: Any) -> int:
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

    def _end(self, frame: CallFrame, result: Any, error: str | None) -> None:
        if frame.index is None:  # its beginning could not be recorded
            return
        self._running -= 1
        lines, leaves = ([], _NOTHING) if error is not None else self._leaves({"outputs": result}, frame)
        lines.append(f'{{"end":{frame.index},{leaves},"error":{"null" if error is None else quoted(error)}}}')
        if frame.parent is None:
            self._write(lines)
        else:  # written with the beginning of the next call: soon enough if the process dies in that call
            self._waiting += lines

    def _leaves(self, value: dict[str, Any], frame: CallFrame) -> tuple[list[str], str]:
        """The lines that describe what is new in a value, and the part of a call's line that refers to them."""
        lines: list[str] = []
        try:
            paths, tensors, others = self._leaf_reader.read(value)
            if paths.number >= self._written_layouts:
                self._written_layouts = paths.number + 1
                named = {"tensors": paths.tensors, "others": paths.others, "empty": paths.empty}
                lines.append(encode({"layout": paths.number, **named}))
            wanted = self._selection(frame.path, frame.number)
            call = f"{frame.path or self._model_name}[{frame.number}]"
            numbers = [
                self._tensor(tensor, f"{call}.{path}" if wanted else None, lines)
                for tensor, path in zip(tensors, paths.tensors, strict=True)
            ]
            text = f'"layout":{paths.number},"tensors":{numbers},"others":{encode(others) if others else "[]"}'
        except OSError:
            raise
        except Exception as error:
            self.note(f"What {frame.path or 'the model'} was given or returned: {described(error)}")
            text = _NOTHING
        return lines, text

    def _tensor(self, tensor: torch.Tensor, key: str | None, lines: list[str]) -> int:
        """The number of the record of a tensor; adds the lines that describe it if it is new."""
        identity = identity_of(tensor)
        seen = None if identity is None else self._seen.get(identity)
        if seen is not None and tensor.is_inference() and measure(tensor).hash != seen.hash:
            seen = None
        if seen is None:
            return self._new_tensor(tensor, identity, key, lines)
        shape = tuple(tensor.shape)
        number = seen.numbers.get(shape)
        if number is None:
            number = seen.numbers[shape] = next(self._tensor_numbers)
            same = next(iter(seen.numbers.values()))
            lines.append(encode({"tensor": number, "as": same, "shape": shape}))
        if key is not None and seen.key is None:
            seen.key = key
            same = next(iter(seen.numbers.values()))
            lines.append(f'{{"stored":{same},{store(tensor, self._files, key)}}}')
        return number

    def _new_tensor(self, tensor: torch.Tensor, identity: Any, key: str | None, lines: list[str]) -> int:
        number, shape = next(self._tensor_numbers), [] if tensor.is_nested else list(tensor.shape)
        line = f'"tensor":{number},"shape":{shape},"dtype":"{dtype_name(tensor.dtype)}","device":"{tensor.device}"'
        stored, measured = key is not None and not tensor.is_meta, None
        try:
            if stored:
                line += f",{store(tensor, self._files, str(key))}"
            if not stored or tensor.is_inference():  # found again by its hash
                measured = measure(tensor)
        except OSError:
            raise
        except Exception as error:
            self.note(f"A {tensor.dtype} tensor could not be read: {described(error)}")
            stored, measured = False, TensorStatistics(Statistics(), "")
        if measured is not None:
            line += f",{measured.text()}"
        if identity is not None:
            if len(self._seen) >= self._clean_at:
                self._seen = {other: seen for other, seen in self._seen.items() if not seen.ref.is_gone()}
                self._clean_at = max(_FIRST_CLEANING, 2 * len(self._seen))
            content_hash, stored_key = "" if measured is None else measured.hash, key if stored else None
            self._seen[identity] = SeenTensor(StorageRef(tensor), {tuple(shape): number}, content_hash, stored_key)
        lines.append(f"{{{line}}}")
        return number

    def _write(self, lines: list[str]) -> None:
        self._files.write_lines([*self._waiting, *lines])
        self._waiting.clear()


@dataclass(slots=True)
class SeenTensor:
    """Content that was recorded.

    Attributes:
        ref: Tells whether the memory that was seen still exists.
        numbers: Numbers of its records, by shape.
        hash: Its hash.
        key: Under which name its values were stored, or None.
    """

    ref: StorageRef
    numbers: dict[tuple[int, ...], int]
    hash: str
    key: str | None = None


def identity_of(tensor: torch.Tensor) -> Any:
    """Returns what tells the content of a tensor from others: its memory, and the version of that.

    It is None for a tensor without memory of its own. A tensor made in inference mode has no version: there the caller
    also compares hashes.
    """
    if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
        return None  # of a class that may keep its values elsewhere
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_quantized:
        return None
    extent = tensor.numel() if tensor.is_contiguous() else (tensor.shape, tensor.stride())
    state = memory_state(tensor)
    return state, tensor.storage_offset(), extent, tensor.dtype, tensor.is_neg(), tensor.is_conj()
