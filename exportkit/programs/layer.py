"""What a layer is, for copies to be made of its nodes: its weights, attributes, arguments and number, by place.

A place is the attributes and items that lead to a value.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from exportkit._torch_compat.modules import buffer_table, module_table, parameter_table
from exportkit._torch_compat.symbolic_shapes import SYMBOLIC, traced_expression
from exportkit._torch_compat.tracing import node_of
from exportkit.trees.caches import ATOMS, is_cache_class
from exportkit.trees.fingerprint import fingerprint

Node = torch.fx.Node
Steps = tuple[Any, ...]  # the attributes and items that lead to a value
_OF_ANY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}


class ValuePlace(NamedTuple):
    """A value, and where it is: an item or an attribute of its holder."""

    value: Any
    holder: Any = None
    name: Any = None

    def read(self) -> Any:
        """Returns what is there now."""
        return self.holder[self.name] if isinstance(self.holder, dict | list) else getattr(self.holder, self.name)

    def write(self, value: Any) -> None:
        """Puts another value there."""
        if isinstance(self.holder, dict | list):
            self.holder[self.name] = value
        else:
            setattr(self.holder, self.name, value)


def places_in(value: Any, own: Collection[Steps] = ()) -> dict[Steps, ValuePlace]:
    """Returns the values inside containers and caches; what these are themselves is found at the place `len`.

    Args:
        value: The value.
        own: Places of items of lists; other items of these lists belong to other layers, and are left out.
    """
    found: dict[Steps, ValuePlace] = {}
    opened: set[int] = set()
    is_left_out = of_others(own)

    def walk(steps: Steps, place: ValuePlace) -> None:
        value, items = place.value, None
        if id(value) in opened:  # it contains itself
            found[steps] = ValuePlace(type(value).__name__)
            return
        if isinstance(value, dict):
            items = list(value.items())
        elif isinstance(value, list | tuple):
            items = list(enumerate(value))
        elif is_cache_class(type(value)):
            items = list(vars(value).items())
        if items is None:
            found[steps] = place
            return
        found[*steps, len] = place._replace(value=(type(value), len(items)))
        opened.add(id(value))
        for name, item in items:
            if not is_left_out((*steps, name)):
                walk((*steps, name), ValuePlace(item, value, name))
        opened.discard(id(value))

    walk((), ValuePlace(value))
    return found


def of_others(own: Collection[Steps]) -> Callable[[Steps], bool]:
    """Returns what tells whether an item of a list belongs to another layer.

    Args:
        own: Places of the items that do not, in lists with an item for each layer.
    """
    lists = {steps[:-1] for steps in own}
    return lambda steps: steps[:-1] in lists and type(steps[-1]) is int and steps not in own


def holders(places: Mapping[Steps, ValuePlace]) -> dict[int, Any]:
    """Returns what holds values at these places, by id."""
    found = [place.holder for steps, place in places.items() if steps[-1:] != (len,)]
    return {id(holder): holder for holder in found if holder is not None}


class LayerCall:
    """A module, the arguments that it is called with, and the nodes of the layer before it."""

    left: Sequence[Node | None]

    def __init__(
        self, tracer: Any, path: str, number: int, module: torch.nn.Module, call: Any, before: Sequence[Node | None]
    ) -> None:
        self.before = before
        self.tracer, self.path, self.number, self.module, self.call = tracer, path, number, module, call
        self.weights, self.attributes, self.has_hooks = contents(module)
        self.held, self.numbers = held(self.attributes), frozenset(self._numbers())
        self.places: dict[Steps, ValuePlace] = {}
        self.described: dict[Steps, Any] = {}

    def look(self, own: Collection[Steps] = ()) -> None:
        """Finds the places of weights and arguments, and describes what is there.

        Args:
            own: Places of items of lists; other items of these lists are left out.
        """
        self.places = places_in(self.call, own) | {steps: ValuePlace(tensor) for steps, tensor in self.weights.items()}
        self.described = descriptions(self.places)

    def _numbers(self) -> Iterator[Steps]:
        """The attributes that hold the number of the layer, as those of another one in the list hold its number."""
        candidates = [steps for steps, value in self.attributes.items() if type(value) is int and value == self.number]
        root = getattr(self.tracer, "scope_root", None)  # the tracer of torch.export has one
        if root is None or not candidates:
            return
        for name, other in root.get_submodule(self.path.rpartition(".")[0]).named_children():
            if type(other) is type(self.module) and name.isdigit() and int(name) != self.number:
                parts = dict(other.named_modules(remove_duplicate=False))
                for part, attribute in candidates:
                    if part in parts and vars(parts[part]).get(attribute) == int(name):
                        yield part, attribute
                return

    def nodes(self) -> dict[Node, set[Steps]]:
        """Returns the places of the tensors, by the nodes that compute them."""
        found: dict[Node, set[Steps]] = {}
        for steps, place in self.places.items():
            node = node_of(place.value, self.tracer)
            if node is not None:
                found.setdefault(node, set()).add(steps)
        for position, node in enumerate(self.before):
            if node is not None:
                found.setdefault(node, set()).add((LayerCall, position))
        return found

    def own_numbers(self, other: LayerCall) -> frozenset[Steps] | None:
        """Returns the attributes that hold the number of each of two layers; None if anything else differs."""
        if self.attributes.keys() != other.attributes.keys() or self.has_hooks or other.has_hooks:
            return None
        found = set()
        for name, value in self.attributes.items():
            if name in self.numbers & other.numbers:
                found.add(name)
            elif self.held[name] != other.held[name]:
                return None
            elif type(value) not in ATOMS:
                rows = _rows(value, max(self.number, other.number))
                if any(fingerprint(row[self.number]) != fingerprint(row[other.number]) for row in rows):
                    return None
        return frozenset(found)


@dataclass(frozen=True, eq=False)
class CopiedLayer:
    """A layer that got copies of the nodes of another layer.

    Attributes:
        path: The path of its module in the model.
        module: Its module.
        source_path: The path of the other one's module.
        source: The other one's module.
        own: Places of what belongs to the other one in a list with an item for each layer.
        shift: How many layers lie between the two.
    """

    path: str
    module: torch.nn.Module
    source_path: str
    source: torch.nn.Module
    own: frozenset[Steps]
    shift: int

    def moved(self, steps: Steps) -> Steps:
        """Returns the place of this layer that corresponds to a place of the other one."""
        return tuple(step + self.shift if steps[: i + 1] in self.own else step for i, step in enumerate(steps))

    def is_called_alike(self, source: Mapping[Steps, Any], described: Mapping[Steps, Any]) -> bool:
        """Returns whether both are called alike, apart from the values of tensors.

        Args:
            source: Descriptions of what the other one is called with, by place.
            described: The same for this layer.
        """
        return {self.moved(steps): item for steps, item in source.items()} == described


def contents(module: torch.nn.Module) -> tuple[dict[Steps, Any], dict[Steps, Any], bool]:
    """Returns the parameters and buffers of a module and its parts, their other attributes, and if they have hooks."""
    weights, attributes = {}, {}
    for path, part in module.named_modules(remove_duplicate=False):
        parameters, buffers = parameter_table(part), buffer_table(part)
        for name, tensor in (*parameters.items(), *buffers.items()):
            weights[torch.nn.Module, path, name] = tensor
        attributes[path, type] = type(part)
        for name, value in vars(part).items():
            if name not in _OF_ANY_MODULE:
                attributes[path, name] = value
    return weights, attributes, any(hook_tables(module))


def hook_tables(module: torch.nn.Module) -> list[Mapping[Any, Any]]:
    """Returns the tables of hooks of a module and its parts."""
    found: list[Mapping[Any, Any]] = []
    for part in module.modules():
        others = (parameter_table(part), buffer_table(part), module_table(part))
        tables = (value for name, value in vars(part).items() if name in _OF_ANY_MODULE and isinstance(value, dict))
        found += [table for table in tables if all(table is not other for other in others)]
    return found


def held(attributes: Mapping[Steps, Any]) -> dict[Steps, Any]:
    """Returns what has to be equal of attributes; tensors in them have to be the same."""
    return {
        steps: description(value) if type(value) in ATOMS else fingerprint(types.SimpleNamespace(value=value))
        for steps, value in attributes.items()
    }


def _rows(value: Any, number: int, depth: int = 2) -> Iterator[Sequence[Any]]:
    """The lists in an object, such as a configuration, that may have an entry for each layer."""
    if isinstance(value, list | tuple):
        if len(value) > number:
            yield value
    elif depth:
        for name, part in (value if isinstance(value, dict) else getattr(value, "__dict__", {})).items():
            if not str(name).startswith("__"):
                yield from _rows(part, number, depth - 1)


def description(value: Any) -> Any:
    """Returns what has to be equal of two values for code to do the same with them."""
    if isinstance(value, torch.Tensor):
        sizes = tuple(map(description, (*value.shape, *value.stride())))
        return type(value), sizes, value.dtype, value.device, value.requires_grad, marks(value)
    if isinstance(value, SYMBOLIC):
        return type(value), traced_expression(value)
    if isinstance(value, list | tuple):
        return type(value), *map(description, value)
    if type(value) is float:
        return float, repr(value)  # 0.0 and -0.0 are not the same
    return type(value), value if type(value) in ATOMS else fingerprint(value)


def descriptions(places: Mapping[Steps, ValuePlace]) -> dict[Steps, Any]:
    """Returns what has to be equal of the values at places for code to do the same with them."""
    return {steps: description(place.value) for steps, place in places.items()}


def marks(tensor: torch.Tensor) -> list[str]:
    """Returns what rewrites have noted on a tensor."""
    return [name for name in vars(tensor) if "exportkit" in name]


class LayerNumber(int):
    """The number of a layer in one of its attributes. It notes what is computed with it."""

    noted: list[tuple[Steps, Callable[..., Any], tuple[Any, ...], Any]]
    name: Steps


def plain_layer_number(value: Any) -> Any:
    """Returns a value; the number of a layer as a plain integer."""
    return int(value) if isinstance(value, LayerNumber) else value


class LayerTable(dict[Any, Any]):
    """A dictionary with an item for each layer. It notes what a layer finds with its number, rather than the hash."""

    def __init__(self, items: Mapping[Any, Any]) -> None:
        super().__init__(items)
        self._written = set[int]()

    def __getitem__(self, key: Any) -> Any:
        return self._found(key, dict.__getitem__)

    def __contains__(self, key: Any) -> bool:
        return bool(self._found(key, dict.__contains__))

    def get(self, key: Any, default: Any = None) -> Any:
        """Returns an item; a default where there is none."""
        return self._found(key, dict.get, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, LayerNumber):
            self._written.add(int(key))
        super().__setitem__(plain_layer_number(key), value)

    def _found(self, key: Any, find: Callable[..., Any], *others: Any) -> Any:
        try:
            found = find(self, plain_layer_number(key), *others)
        except KeyError:
            hash(key)  # which a number notes, so that the layer is not copied
            raise
        if isinstance(key, LayerNumber) and int(key) not in self._written:
            items = dict(self)
            key.noted.append(
                (key.name, lambda number: description(find(items, number, *others)), (), description(found))
            )
        return found


@contextlib.contextmanager
def look_ups_noted(places: Mapping[Steps, ValuePlace]) -> Iterator[None]:
    """Puts a `LayerTable` in place of each dictionary with integers as keys, and its items into the dictionary at last.

    Args:
        places: Where the dictionaries are.
    """
    tables: dict[int, tuple[dict[Any, Any], LayerTable]] = {}
    replaced = []
    try:
        for steps, place in places.items():
            if steps[-1:] == (len,) and place.value[0] is dict and not isinstance(place.holder, tuple | None):
                items = place.read()
                if all(type(key) is int for key in items):
                    table = tables.setdefault(id(items), (items, LayerTable(items)))[1]
                    replaced.append((place, items, table))
                    place.write(table)
        yield
    finally:
        for items, table in tables.values():
            items.clear()
            items.update((plain_layer_number(key), value) for key, value in table.items())
        for place, items, table in replaced:
            if place.read() is table:
                place.write(items)


_BINARY = ("add", "sub", "mul", "floordiv", "truediv", "mod", "divmod", "pow", "lshift", "rshift", "and", "or", "xor")
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
_MIRRORED |= {name: f"r{name}" for name in _BINARY} | {f"r{name}": name for name in _BINARY}


def _noting(name: str, mirrored: str = "") -> Callable[..., Any]:
    """Returns the method of an integer; with what only the other operand can compute, that one gets a plain integer."""
    compute = getattr(int, f"__{name}__")

    def method(self: LayerNumber, *others: Any) -> Any:
        result = compute(self, *others)
        self.noted.append((self.name, compute, others, result))
        if result is NotImplemented and mirrored:
            return getattr(type(others[0]), f"__{mirrored}__", lambda *_: NotImplemented)(others[0], int(self))
        return result

    return method


for _name in ("hash", "bool", "str", "repr", "format", "float", "neg", "pos", "abs", "invert"):
    setattr(LayerNumber, f"__{_name}__", _noting(_name))
for _name, _other in _MIRRORED.items():
    setattr(LayerNumber, f"__{_name}__", _noting(_name, _other))
