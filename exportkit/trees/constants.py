"""Constants, which are compared by their fingerprints: what differs and where, in words; and what holds no tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from exportkit.errors import PlanError, UnregisteredClassError, described
from exportkit.json_data import as_tuples
from exportkit.trees.fingerprint import NONE, NOTHING, TENSOR, Fingerprint, fingerprint
from exportkit.trees.flatten import node_of_object
from exportkit.trees.object_parts import Path
from exportkit.trees.objects import open_object, why_closed
from exportkit.trees.structure import Closed, Nested, RegisteredObject, Structure, join, path_of
from exportkit.trees.tree import Tree

# Where the parts of a fingerprint are, by its kind.
_PARTS = {
    "list": 1, "tuple": 1, "size": 1, "set": 1, "frozenset": 1, "deque": 2, "fields": 2,
    "dict": 1, "mapping": 3,
    "registered": 3, "opened": 3, "object": 2, "nn": 2, "cache": 2,
}  # fmt: skip
_KEYED, _NAMED = ("dict", "mapping"), ("registered", "opened", "object", "nn", "cache")
_BRACKETS = {"list": "[]", "tuple": "()", "size": "()", "set": "{}", "frozenset": "{}", "deque": "[]", "dict": "{}"}
_LONGEST = 200
_MAY_HOLD_CLOSED = frozenset({Closed, Nested, RegisteredObject})


class Mismatch(NamedTuple):
    """Where two values differ, and what each of them is there."""

    path: str
    expected: str
    got: str


def parts_of(value: Fingerprint) -> dict[Any, Fingerprint] | None:
    """Returns what a container or an object holds, by key, name or position; None for any other value."""
    kind = value[0]
    if kind not in _PARTS:
        return None
    parts = value[_PARTS[kind]]
    if kind == "opened":
        return {Path(name): part for name, part in parts}
    if kind in _NAMED:
        return {name or "content": part for name, part in parts}
    if kind in _KEYED:
        return {key[1] if key[0] in ("str", "int") else text_of(key): part for key, part in parts}
    return dict(enumerate(parts))


def difference(
    expected: Fingerprint, got: Fingerprint, path: str = "", lists: Collection[str] = (), recorded: bool = False
) -> Mismatch | None:
    """Returns the first difference between two values, or None if there is none.

    Tensors are equal to each other and to None, in a container too: which of them may be absent, and what their values
    are, is not decided here.

    Args:
        expected: Fingerprint of the value that is taken for right.
        got: Fingerprint of the other one.
        path: Path of both.
        lists: Paths of lists that may hold any number of tensors.
        recorded: Also accept containers without some tensors of the other one, None instead of a container with
            tensors, and nothing instead of None: for calls that were both made.
    """
    if expected == got:
        return None
    mismatch = Mismatch(path, text_of(expected), text_of(got))
    for one, other in ((expected, got), (got, expected)):
        if one in (NONE, NOTHING) and (_only_tensors(other) or (recorded and has_tensors(other))):
            return None
    mine, others = parts_of(expected), parts_of(got)
    if mine is None or others is None or _head(expected) != _head(got):
        return mismatch
    for step in {**mine, **others}:
        inner = path_of((step,), path)
        if step in mine and step in others:
            found = difference(mine[step], others[step], inner, lists, recorded)
            if found is not None:
                return found
            continue
        part, is_extra = (others[step], True) if step in others else (mine[step], False)
        is_open = is_extra or recorded or path in lists or expected[0] == "registered"
        is_field = part == NONE and (recorded or expected[0] == "registered")
        if not is_field and not (is_open and _only_tensors(part)):
            text = text_of(part)
            return Mismatch(inner, *(("nothing", text) if is_extra else (text, "nothing")))
    return None if has_tensors(expected) or has_tensors(got) else mismatch


def constants_in(value: Fingerprint, path: str) -> dict[str, Fingerprint]:
    """Returns the parts of a value that hold no tensors, as large as they are, by path; without None.

    Args:
        value: Fingerprint of the value.
        path: Its path.
    """
    if value in (NONE, NOTHING, TENSOR):
        return {}
    if not has_tensors(value):
        return {path: value}
    found: dict[str, Fingerprint] = {}
    for step, part in (parts_of(value) or {}).items():
        found |= constants_in(part, path_of((step,), path))
    return found


def only_read(value: Fingerprint, read: Mapping[str, Collection[str]]) -> Fingerprint:
    """Returns a value without the attributes of opened objects that code does not read.

    Args:
        value: Fingerprint of the value.
        read: Names of the attributes that code reads, by the name of the class; other classes stay as they are.
    """
    kind = value[0]
    if kind not in _PARTS or not read:
        return value
    if kind == "opened":
        value = _with_attributes(value, read)
    place = _PARTS[kind]
    parts = [
        (part[0], only_read(part[1], read)) if kind in (*_NAMED, *_KEYED) else only_read(part, read)
        for part in value[place]
    ]
    return (*value[:place], tuple(parts), *value[place + 1 :])


def _with_attributes(value: Fingerprint, read: Mapping[str, Collection[str]]) -> Fingerprint:
    """An opened object without the other attributes; parts and leaves are renumbered in the order they are reached."""
    _, name, parts, items = value
    numbers: dict[int, int] = {}
    found: list[Any] = []
    leaves: list[Any] = []

    def visit(part: int) -> int:
        if part in numbers:
            return numbers[part]
        number = numbers[part] = len(found)
        found.append(None)
        cls, names, keys, refs, extra = parts[part]
        kept = list(zip(names, refs, strict=False))
        if cls in read:
            kept = sorted(item for item in kept if item[0] in read[cls])
        new = []
        for kind, old in (*(ref for _, ref in kept), *refs[len(names) :]):
            if kind == "leaf":
                leaves.append(items[old])
            new.append((kind, len(leaves) - 1 if kind == "leaf" else visit(old)))
        found[number] = (cls, tuple(name for name, _ in kept), keys, tuple(new), extra)
        return number

    visit(0)
    return ("opened", name, tuple(found), tuple(leaves))


def has_tensors(value: Fingerprint) -> bool:
    """Returns whether a value is a tensor or a cache, or holds one that can be an input of a graph."""
    if value == TENSOR or value[0] == "cache":
        return True
    if value[0] in ("object", "nn"):
        return False
    return any(map(has_tensors, (parts_of(value) or {}).values()))


def tensor_inside(value: Fingerprint, path: str = "") -> str | None:
    """Returns the path of a tensor in an object that is not opened, so that it cannot be an input of a graph.

    Tensors that a function or a module is bound to are not meant.

    Args:
        value: Fingerprint of the value.
        path: Its path.
    """
    if value[0] == "tensor":
        return path if len(value) > 1 else None
    for step, part in (parts_of(value) or {}).items() if value[0] != "nn" else ():
        found = tensor_inside(part, path_of((step,), path))
        if found is not None:
            return found
    return None


def text_of(value: Fingerprint) -> str:
    """Returns a value in a few words, from its fingerprint."""
    return _text(value)[:_LONGEST]


def _text(value: Fingerprint) -> str:
    kind, *rest = value
    parts = parts_of(value)
    if kind == "nn":
        return f"module {_name(rest[0])}"
    if kind == "object" and parts is not None and "0" in parts:  # by what it is made with
        return f"{_name(rest[0])}{_text(parts['1'])}"
    if kind in ("registered", "opened", "object", "fields", "cache") and parts is not None:
        inner = ", ".join(
            f"{str(step).lstrip('.')}={_text(part)}" if kind in _NAMED else _text(part) for step, part in parts.items()
        )
        return f"{_name(rest[0])}({inner})"
    if parts is not None:
        opening, closing = tuple(_BRACKETS.get(kind, "{}"))
        texts = [f"{step!r}: {_text(part)}" if kind in _KEYED else _text(part) for step, part in parts.items()]
        return f"{opening}{', '.join(texts)}{',' if kind == 'tuple' and len(texts) == 1 else ''}{closing}"
    match kind:
        case "none":
            return "None"
        case "bool" | "int" | "str":
            return repr(rest[0])
        case "float" | "device":
            return str(rest[0])
        case "complex":
            return f"{rest[0]}+{rest[1]}j"
        case "bytes":
            return repr(bytes.fromhex(rest[0]))
        case "torch":
            return f"torch.{rest[0]}"
        case "tensor":
            return "a tensor"
        case "enum":
            return f"{_name(rest[0])}.{rest[1]}"
        case "slice":
            return f"slice({', '.join(map(_text, rest))})"
        case "range":
            return f"range({', '.join(map(str, rest))})"
        case "method" | "partial":
            return f"{kind} of {', '.join(_text(part) for part in rest if isinstance(part, tuple))}"
    return f"{kind} {_name(rest[0])}" if rest and isinstance(rest[0], str) else kind


def _name(name: str) -> str:
    """A class or function without its module."""
    return name.partition(":")[2].partition(" ")[0] or name


def _only_tensors(value: Fingerprint) -> bool:
    """Whether a value holds tensors, and nothing else but None."""
    return has_tensors(value) and not constants_in(value, "")


def _head(value: Fingerprint) -> Fingerprint:
    position = _PARTS[value[0]]
    return value[:position] + value[position + 1 :]


def note_values(structure: Structure) -> None:
    """Notes what the objects in a structure are like now, as they can change later.

    Args:
        structure: The structure of recorded arguments or outputs.
    """
    for _, leaf in _closed(structure.root):
        leaf.noted, leaf.opened = fingerprint(leaf.value), open_object(leaf.value, may_be_empty=True)


def with_changed(structure: Structure) -> Structure:
    """Returns the structure of arguments in which objects that the call changed are opened, as they were before it.

    Args:
        structure: The structure, whose objects were noted before the call.
    """
    marks: list[Any] = []

    def changed(node: Any) -> Any:
        if type(node) is Closed and node.opened is not None and fingerprint(node.value) != node.noted:
            marks.extend((type(node.value), node.opened.paths))
            return node_of_object(type(node.value), node.opened)
        if type(node) is Nested and _holds_closed(node):
            return replace(node, items=tuple(map(changed, node.items)))
        return replace(node, children=changed(node.children)) if type(node) is RegisteredObject else node

    root = changed(structure.root)
    return Structure(root, (*structure.marks, *marks)) if marks else structure


def noted_values(tree: Tree) -> dict[str, Fingerprint]:
    """Returns what the objects in a recorded value were like when it was recorded, by path."""
    return {path: leaf.noted for path, leaf in _closed(tree.structure) if leaf.noted is not None}


def check_opened(name: str, tree: Tree) -> None:
    """Raises UnregisteredClassError if a leaf of argument ``name`` is an object that holds tensors."""
    for path, leaf in tree.constants().items():
        inside = tensor_inside(fingerprint(leaf))
        if inside is not None:
            home, reason = f"{type(leaf).__module__}.{type(leaf).__qualname__}", why_closed(leaf)
            raise UnregisteredClassError(
                f"An object of class {type(leaf).__name__} holds tensors that cannot be inputs or outputs of a graph.",
                where=join(name, path),
                expected="an object that can be rebuilt from its attributes, or a class registered with torch's pytree",
                got=f"{home} with tensors in {inside}{reason and f': {reason}'}",
                hint="torch.utils._pytree.register_pytree_node(cls, flatten, unflatten), before the model runs; "
                "for a dataclass torch.export.register_dataclass(cls).",
            )


def check_unchanged(name: str, tree: Tree) -> None:
    """Raises PlanError if an object in argument ``name`` was changed after the call was recorded."""
    for path, leaf in _closed(tree.structure):
        now = fingerprint(leaf.value)
        if leaf.noted is not None and leaf.noted != now:
            found = difference(leaf.noted, now, join(name, path)) or Mismatch(name, text_of(leaf.noted), text_of(now))
            raise PlanError(
                "An argument of a recorded call was changed after it was recorded, by the model or its caller.",
                where=found.path,
                expected=f"{found.expected}, as recorded",
                got=found.got,
                hint="observe the model again, and leave the object as it is until the model is exported.",
            )


def _closed(node: Any, path: str = "") -> Iterator[tuple[str, Closed]]:
    """Yields the objects that are not opened, outside of caches, with their paths."""
    if type(node) is Closed:
        yield path, node
    elif type(node) is Nested:
        for steps, item in zip(node.spec.paths(), node.items, strict=True) if _holds_closed(node) else ():
            yield from _closed(item, path_of(steps, path))
    elif type(node) is RegisteredObject:
        for steps, item in zip(node.children.spec.paths(), node.items, strict=True):
            yield from _closed(item, path_of((node.names[steps[0]], *steps[1:]), path))


def _holds_closed(node: Nested) -> bool:
    return not _MAY_HOLD_CLOSED.isdisjoint(map(type, node.items))


def from_json(data: Any) -> Fingerprint:
    """Returns the fingerprint that JSON data hold, in which tuples are lists; None for None.

    Raises:
        PlanError: if the data is not a fingerprint.
    """
    value = as_tuples(data)
    try:
        hash(value)
        for found in () if value is None else _parts_below(value):
            text_of(found)
    except Exception as error:  # whatever is raised for data that may be anything
        raise PlanError("A constant is damaged.", got=described(error)) from error
    result: Fingerprint = value
    return result


def _parts_below(value: Any) -> Iterator[Fingerprint]:
    """The value and everything in it."""
    if not isinstance(value, tuple) or not value or not isinstance(value[0], str):
        raise TypeError(f"{str(value)[:_LONGEST]} is not a value")
    yield value
    for part in (parts_of(value) or {}).values():
        yield from _parts_below(part)
