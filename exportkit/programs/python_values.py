"""The Python values of arguments with which a graph was traced, and which calls have to have."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from exportkit.calls.call import Call
from exportkit.calls.signature import Signature
from exportkit.errors import ArgumentError
from exportkit.json_data import InvalidDataError, read
from exportkit.probing.simplify import value_at
from exportkit.trees import Fingerprint, Tree, fingerprint, text_of
from exportkit.trees.constants import Mismatch, difference, from_json, has_tensors, only_read
from exportkit.trees.fingerprint import NOTHING
from exportkit.trees.structure import path_of

_NO_ARGUMENTS: Fingerprint = ("tuple", ())


@dataclass(frozen=True)
class PythonValues:
    """What arguments may be, apart from the values of their tensors.

    A constant is part of the graph, so a call has to have the same one, by type and value. An argument that a call
    leaves out has the default of the model's method.

    Attributes:
        forms: By path of the argument, the fingerprints that are allowed: as it was when the graph was traced, and as
            it was in recorded calls that differ from that only in which tensors they give. Arguments in ``**kwargs``
            are on their own.
        defaults: Fingerprints of what the model takes for an argument that is left out.
        catch_all: Name of ``**kwargs``, if there is one.
        lists: Paths of lists that may hold any number of tensors.
        orders: The keys in their order, of each dict whose order matters to the model, by path.
        read: Names of the attributes that matter of objects, by the name of the class; of other classes, all do.
        unread: Paths of numbers and strings in ``**kwargs`` that the model never reads: any of the same type will do.
    """

    forms: Mapping[str, tuple[Fingerprint, ...]]
    defaults: Mapping[str, Fingerprint]
    catch_all: str | None = None
    lists: tuple[str, ...] = ()
    orders: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    read: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        signature: Signature,
        traced: Mapping[str, Tree],
        calls: Iterable[Call],
        lists: Collection[str] = (),
        read: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> PythonValues:
        """Returns the values for a graph.

        Args:
            signature: Parameters of the exported method.
            traced: The arguments that the graph was traced with.
            calls: The recorded calls.
            lists: Paths of lists that are one tensor in the graph.
            read: Attributes of objects that code reads when the model runs, by the name of the class.
        """

        def described(arguments: Mapping[str, Tree]) -> dict[str, Fingerprint]:
            values = {name: tree.build() for name, tree in arguments.items()}
            found = _by_path(values, signature.var_keyword)
            return {path: only_read(fingerprint(value), read) for path, value in found.items()}

        recorded, first = [described(call.arguments) for call in calls], described(traced)
        plain = [name for name in signature.names if name != signature.var_keyword]
        paths = dict.fromkeys((*plain, *first, *(path for given in recorded for path in given)))
        defaults = {path: NOTHING for path in paths if path not in plain}
        defaults |= {name: fingerprint(value) for name, value in signature.defaults.items()}
        if signature.var_positional is not None:
            defaults[signature.var_positional] = _NO_ARGUMENTS
        forms = {}
        for path in paths:
            form = first.get(path, defaults.get(path))
            if form is not None:
                seen = [given.get(path, defaults.get(path, form)) for given in recorded]
                fitting = [other for other in seen if difference(form, other, path, lists, recorded=True) is None]
                forms[path] = tuple(dict.fromkeys((form, *fitting)))
        return cls(forms, defaults, signature.var_keyword, tuple(lists), read=dict(read))

    def require(self, values: Mapping[str, Any], made: Collection[str] = ()) -> None:
        """Raises ArgumentError if a call has a Python value that the graph was not exported with.

        Args:
            values: The arguments that the call gives, by parameter.
            made: Parameters that the call leaves out, because the outputs of parts are given for them.
        """
        given = _by_path(values, self.catch_all)
        for path, value in given.items():
            found = self._mismatch(path, only_read(fingerprint(value), self.read))
            if found is not None:
                raise _unlike(found)
        missing = {path: found for path, found in self._left_out.items() if path not in given and path not in made}
        if missing:
            raise _are_missing(missing, self.catch_all)
        for path, keys in self.orders.items():
            got = [key for key in value_at(values, path) or () if key in keys]
            expected = [key for key in keys if key in got]
            if got != expected:
                raise ArgumentError(
                    "The model's result depends on the order of these keys.",
                    where=path,
                    expected=", ".join(map(str, expected)),
                    got=", ".join(map(str, got)),
                    hint="give them in this order, or observe the model with the other one and export again.",
                )

    def refused(self, arguments: Mapping[str, Tree]) -> dict[str, Any]:
        """Returns the constants of a call, by path, that the graph was not exported with.

        Args:
            arguments: The arguments that the call gives, by parameter.
        """
        given = _by_path({name: tree.build() for name, tree in arguments.items()}, self.catch_all)
        described = {path: only_read(fingerprint(value), self.read) for path, value in given.items()}
        return {
            path: given[path]
            for path, form in described.items()
            if not has_tensors(form) and not any(map(has_tensors, self.forms.get(path, (form,))))
            if self._mismatch(path, form) is not None
        }

    def required(self) -> list[str]:
        """Returns the paths of constants that a call has to give although the model has a default for them."""
        return [path for path in self._left_out if path in self.defaults]

    def allowing(self, found: Mapping[str, Fingerprint | None]) -> PythonValues:
        """Returns the values with one more that is allowed for each of some constants; None: it may be left out."""
        forms, defaults = dict(self.forms), dict.fromkeys(found, NOTHING) | dict(self.defaults)
        for path, form in found.items():
            forms[path] = (*forms.get(path, (NOTHING,)), defaults[path] if form is None else form)
        return replace(self, forms=forms, defaults=defaults)

    @functools.cached_property
    def _left_out(self) -> dict[str, Mismatch]:
        """The arguments that a call has to give, as it would have another value without them."""
        found = {}
        for path, (form, *_) in self.forms.items():
            if path in self.defaults:
                mismatch = self._mismatch(path, self.defaults[path])
            else:  # whether a tensor may be absent is not decided here
                mismatch = None if has_tensors(form) else Mismatch(path, text_of(form), "nothing")
            if mismatch is not None:
                found[path] = mismatch
        return found

    def _mismatch(self, path: str, value: Fingerprint) -> Mismatch | None:
        forms = self.forms.get(path, (NOTHING,))
        if value in forms or (path in self.unread and value[0] in [form[0] for form in forms]):
            return None
        found = [difference(form, value, path, self.lists) for form in forms]
        return found[0] if None not in found else None

    def to_json(self) -> dict[str, Any]:
        """Returns the values as JSON data."""
        data: dict[str, Any] = {"forms": dict(self.forms), "defaults": dict(self.defaults)}
        orders = {path: list(keys) for path, keys in self.orders.items()}
        read = {name: list(names) for name, names in self.read.items()}
        data |= {"catch_all": self.catch_all, "lists": list(self.lists), "orders": orders, "read": read}
        return data | {"unread": list(self.unread)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PythonValues:
        """Returns the values that `to_json` described."""
        forms, lists = read(Mapping[str, tuple[Any, ...]], data["forms"]), read(tuple[str, ...], data["lists"])
        for path, found in forms.items():
            if not found:
                raise InvalidDataError("a value at least", "none", path)
        return cls(
            {name: tuple(map(_fingerprint, found)) for name, found in forms.items()},
            {name: _fingerprint(found) for name, found in read(Mapping[str, Any], data["defaults"]).items()},
            read(str | None, data["catch_all"]),
            lists,
            read(Mapping[str, tuple[str | int, ...]], data["orders"]),
            read(Mapping[str, tuple[str, ...]], data["read"]),
            read(tuple[str, ...], data["unread"]),
        )


def _fingerprint(data: Any) -> Fingerprint:
    found = from_json(data)
    if not found:
        raise ValueError("a value is missing")
    return found


def _by_path(values: Mapping[str, Any], catch_all: str | None) -> dict[str, Any]:
    """The arguments by path, with those in ``**kwargs`` on their own."""
    found = {name: value for name, value in values.items() if name != catch_all}
    for key, value in values.get(catch_all or "", {}).items():
        found[path_of((key,), catch_all or "")] = value
    return found


def _unlike(found: Mismatch) -> ArgumentError:
    hint = "a constant is part of the graph: observe the model with this value, and export again."
    if found.got == "nothing":
        what, hint = "This argument must be passed.", f"pass {found.expected}, with which the graph was exported."
    elif found.expected == "nothing":
        what, hint = "No recorded call gave this value.", "observe a call that gives it, then export again."
    elif "a tensor" in (found.expected, found.got):
        what, hint = (
            "An argument has a different type from the one that the graph was exported with.",
            "give it as in the recorded calls.",
        )
    else:
        what = "The graph was exported with a different value of this constant."
        if found.expected == found.got:
            hint = "both values print the same but are not equal, or cannot be compared; export again with this value."
    return ArgumentError(what, where=found.path, expected=found.expected, got=found.got, hint=hint)


def _are_missing(missing: Mapping[str, Mismatch], catch_all: str | None) -> ArgumentError:
    is_plural = len(missing) > 1
    given = [f"{path.removeprefix(f'{catch_all}.')}={found.expected}" for path, found in missing.items()]
    reason = "their defaults differ from the values" if is_plural else "its default differs from the value"
    return ArgumentError(
        f"{'These arguments' if is_plural else 'This argument'} must be passed: {reason} in the graph.",
        where=", ".join(missing),
        expected=", ".join(found.expected for found in missing.values()),
        got=", ".join(found.got for found in missing.values()),
        hint=f"give {', '.join(given)}.",
    )
