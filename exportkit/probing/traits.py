"""What a model reads of its arguments besides sizes, dtypes, values and constants.

A graph cannot see how a tensor lies in memory, whether it needs a gradient, of which class it is, whether two arguments
are one tensor, or in which order a dict was filled. So the model is run with arguments that differ only in one of these
properties; if the result changes, calls have to match the call that the graph was traced with in this property.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from exportkit.calls.call import Call
from exportkit.errors import ArgumentError
from exportkit.overrides import Attribute, replaced
from exportkit.plan.leaves import Finding
from exportkit.probing.missing import beyond_rounding
from exportkit.probing.size_reads import Reads
from exportkit.running.eager import detached, kernels_of, run_eager
from exportkit.trees import Tree, fingerprint, flatten, is_cache_class
from exportkit.trees.fingerprint import fingerprinted_class
from exportkit.trees.objects import CONTAINERS
from exportkit.trees.structure import path_of
from exportkit.trees.tree import is_inexact

Values = dict[str, Any]
Change = Callable[[Values], Values]

_LAYOUT = frozenset({"as_strided", "data_ptr", "is_contiguous", "storage_offset", "stride", "untyped_storage"})
_GRADIENT = frozenset({"grad", "grad_fn", "is_leaf", "requires_grad", "retains_grad"})
_WHOLE = frozenset({"__dict__", "__dir__", "__getstate__", "__reduce__", "__reduce_ex__"})
_DICTS = (dict, OrderedDict, defaultdict)
APART = "in memory of its own"
PLAIN = "without attributes that a caller set"


class _OtherClass(torch.Tensor):
    """Behaves like a tensor, and notes which attributes are asked for that tensors do not have."""

    asked: ClassVar[set[str]] = set()

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError."""
        if not name.startswith("_"):  # torch asks for many
            self.asked.add(name)
        raise AttributeError(name)


@dataclass(frozen=True)
class _Trait:
    """Something about a tensor that Python code can read, and operators do not depend on.

    Attributes:
        text: What a tensor is that has it.
        holds: Whether a tensor has it.
        changed: Returns equal tensors without it, or the tensor itself if there are none.
        reads: Methods and attributes of tensors of which a model that depends on it reads one; empty if it need not.
    """

    text: str
    holds: Callable[[torch.Tensor], bool]
    changed: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    reads: frozenset[str] = frozenset()


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(*reversed(range(tensor.ndim))).contiguous().permute(*reversed(range(tensor.ndim)))


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _with_offset(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor])[1]


def _conjugated(tensor: torch.Tensor) -> torch.Tensor:
    return torch.conj_physical(tensor).conj() if tensor.is_complex() else tensor


def _negated(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in (torch.float32, torch.float64):
        return tensor
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


def _inferred(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


def _with_gradient(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_() if is_inexact(tensor) else tensor


_TRAITS = (
    _Trait("contiguous", torch.Tensor.is_contiguous, (_transposed, _channels_last), _LAYOUT),
    _Trait("at the start of its memory", lambda t: t.storage_offset() == 0, (_with_offset,), _LAYOUT),
    _Trait("without a conjugate bit", lambda t: not t.is_conj(), (_conjugated,), frozenset({"is_conj"})),
    _Trait("without a negative bit", lambda t: not t.is_neg(), (_negated,), frozenset({"is_neg"})),
    _Trait("made outside of inference mode", lambda t: not t.is_inference(), (_inferred,), frozenset({"is_inference"})),
    _Trait("without a gradient", lambda t: not t.requires_grad, (_with_gradient,), _GRADIENT),
    _Trait(
        "of class Tensor",
        lambda t: type(t) is torch.Tensor,
        (lambda t: t.as_subclass(_OtherClass), lambda t: torch.nn.Parameter(t, requires_grad=False)),
    ),
    _Trait(PLAIN, lambda t: all(name.startswith("_") for name in vars(t)), ()),  # torch sets some of its own
)


@dataclass(frozen=True)
class Traits:
    """What a model depends on besides sizes, dtypes, values and constants.

    Attributes:
        tensors: What all input tensors have to be, in words.
        orders: The keys in their order, of each dict whose order matters, by path.
        gradients: Whether torch recorded gradients, if the result is another one otherwise; None if it is the same.
    """

    tensors: tuple[str, ...] = ()
    orders: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    gradients: bool | None = None

    def __or__(self, other: Traits) -> Traits:
        """Returns what the model depends on in one call or another."""
        gradients = other.gradients if self.gradients is None else self.gradients
        tensors = tuple(dict.fromkeys((*self.tensors, *other.tensors)))
        return Traits(tensors, {**other.orders, **self.orders}, gradients)

    def findings(self) -> list[Finding]:
        """Returns what a person should know about this."""
        shown = [text for text in self.tensors if text != PLAIN]  # hardly any tensor has such attributes
        asked = [f"the graph accepts only inputs {text}: the model branches on it" for text in shown]
        for path, keys in self.orders.items():
            order = ", ".join(map(str, keys))
            asked.append(f"the graph accepts {path} only with its keys in the order {order}: the result depends on it")
        found = [Finding("limit", text, f"{text}.") for text in asked]
        if self.gradients is not None:
            modes = ("under torch.no_grad()", "where torch records gradients")
            other, own = modes[not self.gradients], modes[self.gradients]
            text = f"the model returns a different result {other}; the graph returns the one obtained {own}."
            found.append(Finding("gradients", "", text))
        return found


def require_traits(wanted: tuple[str, ...], given: Mapping[str, torch.Tensor]) -> None:
    """Raises ArgumentError if a tensor of a call is not what the traits of a model ask for.

    Args:
        wanted: `Traits.tensors`.
        given: The tensors of the call by path.
    """
    for trait in _TRAITS:
        wrong = next((p for p, t in given.items() if not trait.holds(t)), None) if trait.text in wanted else None
        if wrong is not None:
            raise _unlike(wrong, trait.text)
    owners: dict[int, list[torch.Tensor]] = defaultdict(list)
    for path, tensor in given.items() if APART in wanted else ():
        if tensor.numel():
            others = owners[tensor.untyped_storage().data_ptr()]
            if any(_overlap(tensor, other) for other in others):
                raise _unlike(path, APART)
            others.append(tensor)


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one storage have an element in common; halves of a tensor have none."""
    if first.element_size() != second.element_size():
        return True
    spans: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for side, tensor in enumerate((first, second)):
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            spans[stride][side] += size - 1
    spans.pop(0, None)  # along an expanded axis, all elements are one
    distance = int(second.storage_offset()) - int(first.storage_offset())
    return _is_sum(distance, sorted(spans.items(), reverse=True))


def _is_sum(distance: int, spans: Sequence[tuple[int, Sequence[int]]]) -> bool:
    """Whether a distance is a sum of strides, each taken at most so many times forwards, or so many backwards."""
    if not spans:
        return distance == 0
    (stride, (forwards, backwards)), *rest = spans
    least = distance - sum(step * count for step, (count, _) in rest)
    most = distance + sum(step * count for step, (_, count) in rest)
    counts = range(max(-(-least // stride), -backwards), min(most // stride, forwards) + 1)
    return any(_is_sum(distance - count * stride, rest) for count in counts)


def _unlike(path: str, text: str) -> ArgumentError:
    return ArgumentError(
        "The model's result depends on a property of this tensor that a graph cannot see.",
        where=path,
        expected=f"a tensor {text}",
        hint=f"give {path}.detach().clone(memory_format=torch.contiguous_format).",
    )


def find_traits(model: torch.nn.Module, method: str, call: Call, known: set[str] | None = None) -> Traits:
    """Returns what a model depends on besides sizes, dtypes, values and constants, as far as one call shows it.

    Args:
        model: The model.
        method: The method.
        call: The call; the model is run with arguments that are alike.
        known: What was asked of other calls, which is not asked again; what is asked of this one is added.
    """
    reads = Reads()

    def run(change: Change, gradients: bool | None = None) -> Tree:
        def around(values: Values, made: Callable[[Mapping[str, Any]], Any]) -> Any:
            values = change(_each(values, lambda tensor: tensor.clone(memory_format=torch.contiguous_format)))
            if gradients is None:
                with reads:  # in which torch leaves out some kernels
                    return made(values)
            with (
                torch.set_grad_enabled(gradients and not call.gradients),
                kernels_of(replace(call, gradients=gradients)),
            ):
                return made(values)

        return flatten(run_eager(model, method, call, around)).map(detached)

    cached = functools.cache(run)

    def differs(change: Change, usual: Change = dict, gradients: bool | None = None) -> bool:
        own = None if gradients is None else call.gradients
        compare = beyond_rounding(lambda _: run(usual, own).tensors(), model)
        try:
            trees = cached(usual, own), run(change, gradients)
        except Exception:  # the model does not accept such arguments: nothing to compare
            return False
        constants = [{path: fingerprint(value) for path, value in tree.constants().items()} for tree in trees]
        differences = compare(call, *(tree.tensors() for tree in trees))
        return constants[0] != constants[1] or any(found.reason is not None for found in differences)

    cached(dict)
    known = set() if known is None else known
    is_first, fresh = not known, reads.found - known
    _OtherClass.asked.clear()
    tensors, orders, gradients = [], {}, None
    for trait in _TRAITS:
        if trait.reads & fresh if trait.reads else is_first:
            changes = [functools.partial(_each, change=changed) for changed in trait.changed]
            tensors += [trait.text] if any(map(differs, changes)) else []
    tensors += [PLAIN] if _OtherClass.asked else []
    if APART not in known and _Twins.are_in(call):
        tensors += [APART] if differs(_Twins.together, usual=_Twins.apart) else []
        known.add(APART)
    for path, keys in _dicts(call.values()):
        if path not in known and differs(functools.partial(_reordered, path=path)):
            orders[path] = keys
        known.add(path)
    if is_first and differs(dict, gradients=not call.gradients):
        gradients = call.gradients
    known |= reads.found
    found = Traits(tuple(tensors), orders, gradients)
    if found != Traits() and differs(dict):  # by chance, or by what the model keeps
        return Traits()
    return found


def attributes_read(model: torch.nn.Module, method: str, calls: Iterable[Call]) -> dict[str, tuple[str, ...]]:
    """Returns, for each class of objects among the arguments, which of their attributes code reads when the model runs.

    A class is left out if its objects are also read as a whole, such as with ``vars``, or returned.

    Args:
        model: The model.
        method: The method.
        calls: The calls; the model may raise for some of them.
    """
    calls = list(calls)
    classes = {cls for call in calls for tree in call.arguments.values() for cls in tree.object_classes()}
    classes -= {cls for call in calls for cls in call.outputs.object_classes()}
    noted: dict[type, set[str]] = {
        cls: set() for cls in classes if not issubclass(cls, tuple) and cls not in CONTAINERS
    }

    def noting(cls: type) -> Any:
        original: Any = cls.__getattribute__

        def read(self: Any, name: str) -> Any:
            noted[cls].add(name)
            return original(self, name)

        return read

    with replaced([(Attribute(cls, "__getattribute__"), noting(cls)) for cls in noted]):
        for call in calls if noted else ():
            with contextlib.suppress(Exception):
                run_eager(model, method, call)
    return {fingerprinted_class(cls): tuple(sorted(names)) for cls, names in noted.items() if names.isdisjoint(_WHOLE)}


class _Twins:
    """Makes tensors of one shape and dtype equal, apart from those of caches."""

    def __init__(self, copies: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._copies, self._firsts = copies, dict[Any, torch.Tensor]()

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._copies(self._firsts.setdefault((tensor.shape, tensor.dtype), tensor))

    @classmethod
    def apart(cls, values: Values) -> Values:
        """Returns values in which they are copies."""
        return _each(values, cls(torch.Tensor.clone))

    @classmethod
    def together(cls, values: Values) -> Values:
        """Returns values in which they are one tensor."""
        return _each(values, cls(lambda tensor: tensor))

    @staticmethod
    def are_in(call: Call) -> bool:
        """Whether a call has any."""
        kinds = [(t.shape, t.dtype) for tree in _plain_trees(call.arguments) for t in tree.tensors().values()]
        return len(kinds) > len(set(kinds))


def _plain_trees(trees: Mapping[str, Tree]) -> list[Tree]:
    return [tree for tree in trees.values() if not is_cache_class(tree.cls)]


def _each(values: Mapping[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Values:
    """The arguments with each tensor changed, except for caches, which models make themselves."""
    trees = {name: flatten(value) for name, value in values.items()}
    plain = {name: tree for name, tree in trees.items() if not is_cache_class(tree.cls)}

    def changed(leaf: Any) -> Any:
        return change(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return {**values, **{name: tree.map(changed).build() for name, tree in plain.items()}}


def _dicts(value: Any, path: str = "") -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """Yields path and keys of each dict inside of the arguments that has more than one key."""
    for step, part in _steps(value):
        inner = path_of((step,), path)
        if type(part) in _DICTS and len(part) > 1 and all(isinstance(key, str | int) for key in part):
            yield inner, tuple(part)
        yield from _dicts(part, inner)


def _reordered(value: Any, path: str, at: str = "") -> Any:
    """A value in which the dict at a path has its keys in reverse."""
    steps = {step: _reordered(part, path, path_of((step,), at)) for step, part in _steps(value)}
    if type(value) in _DICTS:
        made = copy.copy(value)
        made.clear()
        made.update(reversed(steps.items()) if at == path else steps)
        return made
    return type(value)(steps.values()) if steps else value


def _steps(value: Any) -> Iterable[tuple[Any, Any]]:
    if type(value) in _DICTS:
        return list(value.items())
    return enumerate(value) if type(value) in (list, tuple) else ()
