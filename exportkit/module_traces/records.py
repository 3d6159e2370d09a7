"""What a trace holds, as plain data: a `ModuleCall` for each call, with a `TensorRecord` for each tensor in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

# What a recording leaves to be computed when it stores the values.
DERIVED = ("mean", "std", "min", "max", "nan", "inf", "hash")


@dataclass(frozen=True)
class TensorRecord:
    """What is known of one tensor that a module was given or returned.

    The statistics are those of the finite elements; of complex numbers, those of their absolute values. They are None
    where there is nothing to compute them of. Where the values are stored, statistics and hash are computed of them as
    soon as one is asked for.

    Attributes:
        path: Where it was: ``args[0]``, ``kwargs.attention_mask``, ``outputs.past_key_values.layers[0].keys``.
        shape: Its shape; that of a nested tensor, which has none, is ().
        dtype: Type of its elements, such as ``float32``.
        device: Where it was, such as ``cpu`` or ``cuda:0``.
        mean: Mean.
        std: Standard deviation, of a sample.
        min: Smallest element.
        max: Largest element.
        nan: How many elements are NaN.
        inf: How many elements are infinite.
        hash: Hash of its content: differs if one element differs, or the order; empty if there are no values.
        key: Name of its values in the data file, for `Trace.tensor`; None if they were not stored.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    nan: int
    inf: int
    hash: str
    key: str | None

    @classmethod
    def of_stored(
        cls, path: str, shape: tuple[int, ...], dtype: str, device: str, key: str, derive: Callable[[], dict[str, Any]]
    ) -> TensorRecord:
        """Returns a record whose statistics and hash are what ``derive`` returns, once they are asked for."""
        record = object.__new__(cls)
        known = {"path": path, "shape": shape, "dtype": dtype, "device": device, "key": key}
        vars(record).update(known, _derive=derive)
        return record

    def __getattr__(self, name: str) -> Any:
        derive = vars(self).get("_derive")
        if derive is None or name not in DERIVED:
            raise AttributeError(name)
        vars(self).update(derive())
        return vars(self)[name]

    def __reduce__(self) -> Any:
        return TensorRecord, tuple([getattr(self, each.name) for each in fields(self)])


@dataclass(frozen=True)
class ModuleCall:
    """One call of one module.

    Attributes:
        index: How many calls of all modules began before.
        path: Path of the module in the model; that of the model itself is "".
        class_name: Class of the module.
        number: How many calls of this module began before.
        parent: Index of the call inside of which it was made, or None.
        inputs: The tensors among its arguments.
        outputs: The tensors in what it returned.
        other_inputs: The other arguments by path: what JSON can hold, and texts in the place of what it cannot.
        other_outputs: The same of what it returned.
        error: What it raised, or why its end is missing; None if it returned.
        thread: Number of the thread that made the call; that of the first call is 0.
    """

    index: int
    path: str
    class_name: str
    number: int
    parent: int | None
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]
    other_inputs: Mapping[str, Any] = field(default_factory=dict)
    other_outputs: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    thread: int = 0
