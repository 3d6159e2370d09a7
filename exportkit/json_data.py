"""Checks JSON data from files against types, before anything is built from it; and makes JSON data of values.

The annotations of the dataclasses that a file describes are its schema. A file may come from anywhere: whatever it
holds, the result is either values of the annotated types or `InvalidDataError`, which says where in the data.
"""

from __future__ import annotations

import functools
import json
import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

_Reader = Callable[[Any], Any]

# What torch and ONNX hold a size in: a signed integer of 64 bits.
_INTEGERS = range(-(2**63), 2**63)
Size = Annotated[int, range(2**63)]
Positive = Annotated[int, range(1, 2**63)]
_LONGEST_TEXT = 100  # of data that are shown in a message


class InvalidDataError(ValueError):
    """JSON data that are not of the expected type. Readers of files turn it into an error that names the file."""

    def __init__(self, expected: str, got: object, path: str = "") -> None:
        self.expected, self.got, self.path = expected, got, path
        text = got if isinstance(got, str) else repr(got)[:_LONGEST_TEXT]
        where = path.removeprefix(".")
        super().__init__(f"{where}: expected {expected}, got {text}" if where else f"expected {expected}, got {text}")

    def below(self, step: str) -> InvalidDataError:
        """Returns the same error, one step further from the place where it was found."""
        return InvalidDataError(self.expected, self.got, step + self.path)


def parse_json(text: str | bytes) -> Any:
    """Returns the data of a JSON text. NaN and infinities, which JSON lacks, are refused.

    Raises:
        ValueError: if it is not valid JSON, or nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("the data is nested too deeply") from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def read(kind: Any, data: Any) -> Any:
    """Returns JSON data as a value of a type: a dataclass, or whatever else can be written as an annotation.

    Lists become tuples and sets where the annotation says so. A dataclass is read from a dict; fields that have a
    default may be missing.

    Raises:
        InvalidDataError: if the data is of a different type.

    Example:
        >>> read(tuple[tuple[str, int], ...], [["a", 1]])
        (('a', 1),)
        >>> read(Size, -1)
        Traceback (most recent call last):
        ...
        exportkit.json_data.InvalidDataError: expected an integer from 0 to 9223372036854775807, got -1
    """
    return _reader(kind)(data)


def as_json_data(value: Any) -> Any:
    """Returns a value as JSON data: a dataclass as a dict, NaN as None, and an infinity as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: as_json_data(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: as_json_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json_data(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def as_tuples(data: Any) -> Any:
    """Returns JSON data with tuples in place of lists, however deep they are."""
    return tuple(map(as_tuples, data)) if isinstance(data, list | tuple) else data


@functools.cache
def _reader(kind: Any) -> _Reader:
    """The function that checks and converts data for an annotation."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return functools.partial(_integer, arguments[1])
    if origin in (Union, types.UnionType):
        return functools.partial(_union, [_reader(one) for one in arguments])
    if origin is Literal:
        return functools.partial(_literal, arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return functools.partial(_fixed, [_reader(one) for one in arguments])
    if origin in (tuple, list, frozenset):
        return functools.partial(_items, origin, _reader(arguments[0]))
    if origin in (dict, Mapping):
        return functools.partial(_mapping, _reader(arguments[1]))
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        readers = {each.name: _reader(hints[each.name]) for each in fields(kind) if each.init}
        required = {each.name for each in fields(kind) if each.default is each.default_factory is MISSING}
        return functools.partial(_fields, kind, readers, required & readers.keys())
    return _PLAIN[kind]


def _any(data: Any) -> Any:
    return data


def _text(data: Any) -> Any:
    if type(data) is not str:
        raise InvalidDataError("a string", data)
    if not data.isascii():
        try:
            data.encode()
        except UnicodeEncodeError:  # half of a pair of surrogates, which no file and no terminal can be given
            raise InvalidDataError("a string of Unicode characters", ascii(data)) from None
    return data


def _boolean(data: Any) -> Any:
    if type(data) is not bool:
        raise InvalidDataError("true or false", data)
    return data


def _integer(allowed: range, data: Any) -> Any:
    if type(data) is not int or data not in allowed:
        raise InvalidDataError(f"an integer from {allowed.start} to {allowed.stop - 1}", data)
    return data


def _number(data: Any) -> Any:
    if type(data) is int and data in _INTEGERS:
        return data
    if type(data) is not float or not math.isfinite(data):
        raise InvalidDataError("a number", data)
    return data


def _nothing(data: Any) -> Any:
    if data is not None:
        raise InvalidDataError("null", data)
    return data


def _union(readers: list[_Reader], data: Any) -> Any:
    found: InvalidDataError | None = None
    for reader in readers:
        try:
            return reader(data)
        except InvalidDataError as error:  # the one that got furthest says most
            found = error if found is None or len(error.path) > len(found.path) else found
    assert found is not None
    raise found


def _literal(allowed: tuple[Any, ...], data: Any) -> Any:
    if not any(type(data) is type(one) and data == one for one in allowed):
        raise InvalidDataError(" or ".join(map(repr, allowed)), data)
    return data


def _items(cls: type, reader: _Reader, data: Any) -> Any:
    if type(data) is not list:
        raise InvalidDataError("a list", data)
    found = _read_each((reader, item) for item in data)
    return found if cls is list else cls(found)


def _fixed(readers: list[_Reader], data: Any) -> Any:
    if type(data) is not list or len(data) != len(readers):
        raise InvalidDataError(f"a list of {len(readers)} values", data)
    return tuple(_read_each(zip(readers, data, strict=True)))


def _read_each(items: Iterable[tuple[_Reader, Any]]) -> list[Any]:
    found: list[Any] = []
    try:
        for reader, item in items:
            found.append(reader(item))
    except InvalidDataError as error:
        raise error.below(f"[{len(found)}]") from None
    return found


def _mapping(reader: _Reader, data: Any) -> Any:
    if type(data) is not dict:
        raise InvalidDataError("a dict", data)
    found, name = {}, ""
    try:
        for name, item in data.items():
            found[name] = reader(item)
        return found
    except InvalidDataError as error:
        raise error.below(f".{name}") from None


def _fields(kind: Any, readers: Mapping[str, _Reader], required: set[str], data: Any) -> Any:
    if type(data) is not dict:
        raise InvalidDataError("a dict", data)
    if data.keys() - readers.keys():
        raise InvalidDataError(f"the names {', '.join(readers)}", ", ".join(data)[:_LONGEST_TEXT])
    if required - data.keys():
        raise InvalidDataError(f"a value for {', '.join(sorted(required - data.keys()))}", "none")
    found, name = {}, ""
    try:
        for name, item in data.items():
            found[name] = readers[name](item)
    except InvalidDataError as error:
        raise error.below(f".{name}") from None
    return kind(**found)


_PLAIN: dict[Any, _Reader] = {
    Any: _any,
    str: _text,
    bool: _boolean,
    int: functools.partial(_integer, _INTEGERS),
    float: _number,
    None: _nothing,
    type(None): _nothing,
}
