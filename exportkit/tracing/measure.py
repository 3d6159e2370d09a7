"""What a trace says of a tensor. In comes a tensor; out come statistics, a hash and, if values are kept, their places.

The bytes are gone through once: while a piece is in the cache of the processor it is hashed, measured and written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from exportkit import _torch_compat
from exportkit.tracing.digest import Digest
from exportkit.tracing.files import TraceFiles
from exportkit.tracing.forms import Form, form_of, is_plain, pieces_of, stored_type
from exportkit.tracing.statistics import Accumulator, Statistics

_ORDINARY = (torch.Tensor, torch.nn.Parameter)


class Measured(NamedTuple):
    """What was found out about a tensor.

    Attributes:
        statistics: Its statistics.
        hash: Its hash; empty if it has no values.
        stored: What the index says about where its values are; None if they were not kept.
    """

    statistics: Statistics
    hash: str
    stored: dict[str, Any] | None


def measure(tensor: torch.Tensor, files: TraceFiles | None = None, key: str = "") -> Measured:
    """Returns what is to be said of a tensor, and writes its values into ``files`` under ``key``.

    Raises:
        OSError: if they cannot be written.
        RuntimeError: or whatever torch raises, if it does not let one look into the tensor.
    """
    if type(tensor) in _ORDINARY and is_plain(tensor):
        form = Form("dense", {"": tensor}, (tensor,))
    else:
        with _torch_compat.apart_from_modes():
            form = form_of(tensor)
    with np.errstate(all="ignore"):
        return _measured(form, files, key)


def _measured(form: Form, files: TraceFiles | None, key: str) -> Measured:
    accumulator = Accumulator(form.numbers[0].dtype if form.numbers else torch.float32)
    numbers = [id(dense) for dense in form.numbers]
    hashes, parts = [], {}
    for name, dense in form.parts.items():
        digest, is_number, offset = Digest(), id(dense) in numbers, files.offset if files else 0
        for piece in pieces_of(dense):
            digest.update(piece)
            if is_number:
                accumulator.add(piece)
            if files is not None:
                files.write_data(piece)
        hashes.append(digest.text())
        if files is not None:
            dtype, shape = stored_type(dense)
            files.name_data(f"{key}.{name}" if name else key, dtype, shape, offset)
            parts[name] = {"dtype": _name(dense.dtype), "shape": list(dense.shape), "offset": offset}
    kept = [id(dense) for dense in form.parts.values()]
    for dense in form.numbers:
        if id(dense) not in kept:
            for piece in pieces_of(dense):
                accumulator.add(piece)
    stored = {"kind": form.kind, "parts": parts, **form.details} if parts else None
    return Measured(accumulator.result(lambda: _all_pieces(form)), _joined(hashes), stored)


def _all_pieces(form: Form) -> Iterator[memoryview]:
    for dense in form.numbers:
        yield from pieces_of(dense)


def _joined(hashes: list[str]) -> str:
    if len(hashes) < 2:
        return "".join(hashes)
    return hashlib.blake2b("".join(hashes).encode(), digest_size=8).hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
