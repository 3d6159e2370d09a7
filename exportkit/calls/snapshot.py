"""Snapshots of nested values: what a call was given, as it was then, whatever the model does to it later.

A snapshot is made as quickly as safety allows:

- Small tensors of one shape are copied together, by one kernel.
- Large tensors are shared by copy-on-write, if that cannot be noticed. Keeping references and comparing version
  counters would not do: it shows only afterwards that a value is lost, and copying during the call is what must be
  avoided.
- All other tensors are copied one by one.

Copy-on-write never changes the values that torch code sees. But the tensor that is written first moves to other memory,
which cuts off other holders of its memory (numpy, DLPack, an address). So it is used only for tensors that
are usually not written, and whose memory no other code can have seen: values that a cache replaces when it grows, fresh
results of the model, and tensors that are still shared since an earlier snapshot. All other large tensors are copied:
preallocated caches, plain inputs, views, and everything that is not in the CPU's memory (a captured CUDA graph contains
addresses, and ``record_stream`` does nothing for shared memory).

`Memory` limits how much memory all snapshots hold together.
"""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from exportkit._torch_compat.memory import (
    are_copy_on_write,
    copies_on_write,
    is_only_holder,
    memory_address,
    version_of,
)
from exportkit.trees.flatten import Flattened
from exportkit.trees.structure import Structure
from exportkit.trees.tree import Tree, shape_of

Result = TypeVar("Result")

FEW = 4  # up to here, looking for tensors that are alike costs more than copying each
SAMPLE = 4  # this many tensors of one attribute show how all of them are laid out
LARGE = 2**15  # bytes; from here on, copying a tensor takes longer than sharing it

# Dtypes that torch.stack copies as they are; it requantises quantised ones, and does not support some rare ones.
_STACKED = frozenset(
    {torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8}
    | {torch.uint8, torch.bool, torch.complex64, torch.complex128}
)

_dtype = operator.attrgetter("dtype")

# Pieces of memory in bytes, each with its address where snapshots share it, so that it counts once; otherwise None.
Parts = list[tuple[int | None, int]]
# Positions of tensors, and their copies: a list of them, or one tensor that has them along its first axis.
_Piece = tuple[Sequence[int], torch.Tensor | list[torch.Tensor]]


class Snapshot:
    """A nested value as it was.

    Args:
        structure: Its structure.
        pieces: Copies of its tensors.
    """

    __slots__ = ("_pieces", "_shapes", "_tensors", "structure")

    def __init__(self, structure: Structure, pieces: list[_Piece]) -> None:
        self.structure, self._pieces = structure, pieces
        self._tensors: list[torch.Tensor] | None = None
        self._shapes: list[tuple[int, ...]] | None = None

    def tree(self) -> Tree:
        """Returns the value as a tree around the copies."""
        return Tree(self.structure.root, self.structure.listed(), self)

    def tensors(self) -> list[torch.Tensor]:
        """Returns the copies, each time the same ones."""
        if self._tensors is None:
            self._tensors = self._in_order(_parts)
        return self._tensors

    def shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of the tensors."""
        if self._shapes is None:
            self._shapes = self._in_order(_part_shapes)
        return self._shapes

    def _in_order(self, parts_of: Callable[[_Piece], Sequence[Result]]) -> list[Result]:
        found: list[Any] = [None] * sum([len(positions) for positions, _ in self._pieces])
        for piece in self._pieces:
            positions, parts = piece[0], parts_of(piece)
            if isinstance(positions, range):
                found[positions.start : positions.stop] = parts
            else:
                for position, part in zip(positions, parts, strict=True):
                    found[position] = part
        return found

    def memory(self) -> Parts:
        """Returns the memory that the copies hold."""
        every = [copies if isinstance(copies, list) else [copies] for _, copies in self._pieces]
        return [(memory_address(copy), _bytes(copy)) for copies in every for copy in copies]


def _parts(piece: _Piece) -> Sequence[torch.Tensor]:
    _, copies = piece
    # detached from the piece, so that each of them can be changed in place
    return copies if isinstance(copies, list) else [part.detach() for part in copies.unbind()]


def _part_shapes(piece: _Piece) -> Sequence[tuple[int, ...]]:
    positions, copies = piece
    if isinstance(copies, list):
        return [shape_of(copy) for copy in copies]
    return [tuple(copies.shape[1:])] * len(positions)


class Copying:
    """The copies to be made of a value.

    Args:
        found: The structure of any nested value, and the tensors in it.
        inputs: Identities of the large tensors that the model was given; None if this is what it was given.
    """

    __slots__ = ("_apart", "_inputs", "_large", "_shared", "_tensors", "_together", "structure")

    def __init__(self, found: Flattened, inputs: frozenset[int] | None = None) -> None:
        self.structure, self._tensors, runs = found
        self._together, self._apart = _grouped(self._tensors, runs)
        self._inputs = inputs
        self._large = _large(self._tensors, self._apart)
        self._shared = self._find_shared() if self._large else []

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the tensors."""
        return shape_list(self._tensors)

    def require_gradients(self) -> bool:
        """Returns whether torch records gradients, and any of the tensors needs one."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self._tensors)

    def large(self) -> frozenset[int]:
        """Returns the identities of the large tensors."""
        return frozenset([id(self._tensors[position]) for position in self._large])

    def memory(self) -> Parts:
        """Returns the memory that the copies will hold."""
        tensors, shared = self._tensors, frozenset(self._shared)
        together = [(None, len(group) * _bytes(tensors[group[0]])) for group in self._together]
        apart = [(memory_address(tensors[i]) if i in shared else None, _bytes(tensors[i])) for i in self._apart]
        return [*together, *apart]

    def snapshot(self) -> Snapshot:
        """Makes the copies, independent of autograd and inference mode, and releases the originals."""
        pieces = _plainly(self._pieces)
        del self._tensors
        return Snapshot(self.structure, pieces)

    def _pieces(self) -> list[_Piece]:
        pieces = [self._copied_together(group) for group in self._together]
        if self._shared:
            originals = _at(self._shared, self._tensors)
            pairs = zip(copies_on_write(originals), originals, strict=True)
            pieces.append((self._shared, [_copied(original) if copy is None else copy for copy, original in pairs]))
        if len(self._shared) < len(self._apart):
            others = sorted(set(self._apart).difference(self._shared)) if self._shared else self._apart
            pieces.append((others, list(map(_copied, _at(others, self._tensors)))))
        return pieces

    def _copied_together(self, group: Sequence[int]) -> _Piece:
        tensors = _at(group, self._tensors)
        try:
            return group, torch.stack(tensors)
        except RuntimeError:  # of other shapes, or on several devices
            return group, list(map(_copied, tensors))

    def _find_shared(self) -> list[int]:
        """The positions of large tensors that can be shared by copy-on-write."""
        plain, tensors = self._large, _at(self._large, self._tensors)
        if list(map(type, tensors)).count(torch.Tensor) < len(tensors):
            plain = [i for i in self._large if type(self._tensors[i]) is torch.Tensor]
            tensors = _at(plain, self._tensors)
        still_shared = are_copy_on_write(tensors)
        if all(still_shared):
            return plain
        growing = self.structure.growing_tensors()
        pairs = zip(plain, still_shared, strict=True)
        return [i for i, is_shared in pairs if is_shared or self._may_share(self._tensors[i], i in growing)]

    def _may_share(self, tensor: torch.Tensor, is_growing: bool) -> bool:
        if is_growing:
            unwritten = not version_of(tensor)  # a tensor of inference mode has no version
        else:
            is_fresh = self._inputs is not None and id(tensor) not in self._inputs
            unwritten = is_fresh and version_of(tensor) == 0
        if not unwritten or not _is_ordinary(tensor) or not is_only_holder(tensor):
            return False
        return tensor.untyped_storage().nbytes() <= 1.1 * tensor.nbytes


def _at(positions: Sequence[int], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(positions, range):
        return tensors[positions.start : positions.stop]
    return [tensors[position] for position in positions]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if type(tensor) is torch.Tensor else tensor.detach().clone()


def shape_list(tensors: list[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of tensors."""
    try:
        return tuple([tensor.shape for tensor in tensors])
    except RuntimeError:
        return tuple(map(shape_of, tensors))


def _plainly(step: Callable[[], Result]) -> Result:
    """What ``step`` returns, run without autograd and outside of inference mode."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return step()
    if torch.is_grad_enabled():
        with torch.no_grad():
            return step()
    return step()


def _grouped(tensors: list[torch.Tensor], runs: list[range]) -> tuple[list[Sequence[int]], list[int]]:
    """The positions of tensors that are copied together, and the positions of tensors that are copied one by one."""
    together: list[Sequence[int]] = []
    apart: list[int] = []
    settled: list[range] = []
    for run in _joined(tensors, runs):
        if not _is_small(tensors[run.start]):
            apart.extend(run)
        elif _are_alike(tensors[run.start : run.stop]):
            together.append(run)
        else:
            continue
        settled.append(run)
    others = _between(settled, len(tensors))
    if len(others) <= FEW:
        apart.extend(others)
        return together, apart
    groups: dict[Any, list[int]] = {}
    for index in others:
        tensor = tensors[index]
        if _is_small(tensor) and type(tensor) is torch.Tensor and _is_dense(tensor) and tensor.is_contiguous():
            groups.setdefault((tensor.shape, tensor.dtype), []).append(index)
        else:
            apart.append(index)
    for group in groups.values():
        if len(group) > 1:
            together.append(group)
        else:
            apart.append(group[0])
    return together, apart


def _joined(tensors: list[torch.Tensor], runs: list[range]) -> list[range]:
    """The runs; neighbours that begin with tensors of one shape become one: the keys and the values of a cache."""
    joined: list[range] = []
    for run in runs:
        if joined and joined[-1].stop == run.start and tensors[joined[-1].start].shape == tensors[run.start].shape:
            joined[-1] = range(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return joined


def _between(runs: list[range], end: int) -> list[int]:
    """The positions outside of runs, which come in order."""
    found: list[int] = []
    start = 0
    for run in runs:
        found.extend(range(start, run.start))
        start = run.stop
    found.extend(range(start, end))
    return found


def _are_alike(tensors: list[torch.Tensor]) -> bool:
    """Whether ordinary small tensors can be copied together if they have one shape, which torch.stack checks.

    Strides are looked at in some of them: layers of one class come from the same operation, and copies of another
    layout have the right values in any case.
    """
    first = tensors[0]
    if not _is_dense(first) or list(map(_dtype, tensors)).count(first.dtype) < len(tensors):
        return False
    return all(map(torch.Tensor.is_contiguous, tensors[:: max(1, len(tensors) // SAMPLE)]))


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_small(tensor: torch.Tensor) -> bool:
    return _bytes(tensor) < LARGE and tensor.dtype in _STACKED


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether it is what torch.empty returns on the CPU."""
    plain = tensor.layout is torch.strided and tensor.is_cpu
    return plain and not (tensor.is_quantized or tensor.is_nested or tensor.is_neg() or tensor.is_conj())


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of the values; of a sparse tensor as many as if it were dense."""
    return tensor.numel() * tensor.dtype.itemsize


def _large(tensors: list[torch.Tensor], positions: Sequence[int]) -> list[int]:
    try:
        return [i for i in positions if tensors[i].nbytes >= LARGE]
    except RuntimeError:  # a sparse one does not say
        return [i for i in positions if _bytes(tensors[i]) >= LARGE]


class Share(NamedTuple):
    """Memory that was granted to a snapshot."""

    memory: Memory
    parts: Parts

    def give_back(self) -> None:
        """Frees the memory for other snapshots."""
        self.memory.give_back(self.parts)


class Memory:
    """Counts bytes up to a limit.

    Args:
        limit: The most bytes; None to grant everything and count nothing.
        held: Memory that is held already.
    """

    def __init__(self, limit: int | None, held: Parts) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._held = 0
        self._sharers: Counter[int] = Counter()
        self._uncounted = Share(self, [])
        self._add(held)

    def take(self, wanted: Callable[[], Parts]) -> Share | None:
        """Returns a share of the wanted size, or None if there is no room for it."""
        if self.limit is None:
            return self._uncounted
        parts = wanted()
        with self._lock:
            self._add(parts)
            if self._held <= self.limit:
                return Share(self, parts)
            self._remove(parts)
        return None

    def give_back(self, parts: Parts) -> None:
        """Frees memory that was granted."""
        with self._lock:
            self._remove(parts)

    def _add(self, parts: Parts) -> None:
        for address, size in parts:
            if address is None or not self._sharers[address]:
                self._held += size
            if address is not None:
                self._sharers[address] += 1

    def _remove(self, parts: Parts) -> None:
        for address, size in parts:
            if address is not None:
                self._sharers[address] -= 1
            if address is None or not self._sharers[address]:
                self._held -= size
