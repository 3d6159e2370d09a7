"""What a trace says of a tensor. In comes a tensor; out come statistics and a hash, or the place of its values.

The bytes are gone through once: while a piece is in the cache of the processor it is hashed and measured. Where values
are stored, they are only written: statistics and hash are computed of them when a trace is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from exportkit._torch_compat.memory import memory_of
from exportkit._torch_compat.tracing import apart_from_modes
from exportkit.module_traces.files import TraceFiles, encode, quoted
from exportkit.module_traces.forms import Form, form_of, is_plain, pieces_of, stored_type
from exportkit.module_traces.statistics import Accumulator, Statistics

_ORDINARY = (torch.Tensor, torch.nn.Parameter)


class Measured(NamedTuple):
    """What was found out about a tensor.

    Attributes:
        statistics: Its statistics.
        hash: XXH3 of its bytes, in 64 bits: it is against faults, not against people. Empty if it has no values.
    """

    statistics: Statistics
    hash: str

    def text(self) -> str:
        """Returns what the index is to say, as part of a line."""
        numbers = [f'"{name}":{_number(value)}' for name, value in self.statistics._asdict().items()]
        return f'{",".join(numbers)},"hash":"{self.hash}"'


def _number(value: float | None) -> str:
    """A number as JSON has it; those that it lacks as texts."""
    if value is None:
        return "null"
    return repr(value) if math.isfinite(value) else f'"{value}"'


def measure(tensor: torch.Tensor) -> Measured:
    """Returns statistics and hash of a tensor.

    Raises:
        RuntimeError: or whatever torch raises, if it does not let one look into the tensor.
    """
    form = _form(tensor)
    accumulator = Accumulator(form.numbers[0].dtype if form.numbers else torch.float32)
    numbers, hashes = [id(dense) for dense in form.numbers], []
    with np.errstate(all="ignore"):
        for dense in form.parts.values():
            digest, is_number = xxhash.xxh3_64(), id(dense) in numbers
            for piece in pieces_of(dense):
                digest.update(piece)
                if is_number:
                    accumulator.add(piece)
            hashes.append(digest.hexdigest())
        parts = [id(dense) for dense in form.parts.values()]
        for piece in (piece for dense in form.numbers if id(dense) not in parts for piece in pieces_of(dense)):
            accumulator.add(piece)
        return Measured(accumulator.result(lambda: _all_pieces(form)), _joined(hashes))


def store(tensor: torch.Tensor, files: TraceFiles, key: str) -> str:
    """Writes the values of a tensor; returns what the index is to say about where they are, as part of a line.

    Raises:
        OSError: if they cannot be written.
        RuntimeError: or whatever torch raises, if it does not let one look into the tensor.
    """
    if _is_simple(tensor):
        part = _store_part(tensor, [memory_of(tensor)], files, key)
        return f'"key":{quoted(key)},"kind":"dense","parts":{{"":{part}}},"details":{{}}'
    form, parts = _form(tensor), []
    for name, dense in form.parts.items():
        part = _store_part(dense, pieces_of(dense), files, f"{key}.{name}" if name else key)
        parts.append(f'"{name}":{part}')
    return f'"key":{quoted(key)},"kind":"{form.kind}","parts":{{{",".join(parts)}}},"details":{encode(form.details)}'


def _store_part(dense: torch.Tensor, pieces: Iterable[memoryview], files: TraceFiles, name: str) -> str:
    """Writes the bytes of a dense tensor under a name; returns where they are."""
    offset = files.offset
    for piece in pieces:
        files.write_data(piece)
    dtype, shape = stored_type(dense)
    files.name_data(name, dtype, shape, offset)
    return f'{{"dtype":"{type_name(dense)}","shape":{list(dense.shape)},"offset":{offset}}}'


def _is_simple(tensor: torch.Tensor) -> bool:
    """Whether it is of no class of its own, and its bytes can be read as they are."""
    return type(tensor) in _ORDINARY and is_plain(tensor)


def _form(tensor: torch.Tensor) -> Form:
    if _is_simple(tensor):
        return Form("dense", {"": tensor}, (tensor,))
    with apart_from_modes():
        return form_of(tensor)


def _all_pieces(form: Form) -> Iterator[memoryview]:
    for dense in form.numbers:
        yield from pieces_of(dense)


def _joined(hashes: list[str]) -> str:
    if len(hashes) < 2:
        return "".join(hashes)
    return xxhash.xxh3_64_hexdigest("".join(hashes).encode())


def type_name(tensor: torch.Tensor) -> str:
    """Returns the type of the elements of a tensor, such as ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")
