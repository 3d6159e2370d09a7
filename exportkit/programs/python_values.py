"""The Python values of arguments with which a graph was traced, and which calls have to have."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from exportkit.calls.call import Call, Signature
from exportkit.errors import ArgumentError
from exportkit.trees import Fingerprint, Tree, fingerprint, text_of
from exportkit.trees.constants import Mismatch, difference, from_json, has_tensors

_NO_ARGUMENTS: Fingerprint = ("tuple", ())
_NO_KEYWORDS: Fingerprint = ("dict", ())


@dataclass(frozen=True)
class PythonValues:
    """What arguments may be, apart from the values of their tensors.

    A constant is part of the graph, so a call has to have the same one, by type and value. An argument that a call
    leaves out has the default of the model's method.

    Attributes:
        forms: By parameter, the fingerprints that are allowed: as it was when the graph was traced, and as it was in
            recorded calls that differ from that only in which tensors they give.
        defaults: Fingerprints of the defaults by parameter; of ``*args`` and ``**kwargs``, of no arguments.
        lists: Paths of lists that may hold any number of tensors.
    """

    forms: Mapping[str, tuple[Fingerprint, ...]]
    defaults: Mapping[str, Fingerprint]
    lists: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, signature: Signature, traced: Mapping[str, Tree], calls: Collection[Call], lists: Collection[str] = ()
    ) -> PythonValues:
        """Returns the values for a graph.

        Args:
            signature: Parameters of the exported method.
            traced: The arguments that the graph was traced with.
            calls: The recorded calls.
            lists: Paths of lists that are one tensor in the graph.
        """
        defaults = {name: fingerprint(value) for name, value in signature.defaults.items()}
        if signature.var_positional is not None:
            defaults[signature.var_positional] = _NO_ARGUMENTS
        if signature.var_keyword is not None:
            defaults[signature.var_keyword] = _NO_KEYWORDS
            lists = (*lists, signature.var_keyword)  # which of its tensors may be absent is decided by path
        recorded = [{name: fingerprint(tree.build()) for name, tree in call.arguments.items()} for call in calls]
        forms = {}
        for name in signature.names:
            found = [given.get(name, defaults.get(name)) for given in recorded]
            first = fingerprint(traced[name].build()) if name in traced else defaults.get(name)
            if first is not None:
                fitting = [f for f in found if f is not None and difference(first, f, name, lists, True) is None]
                forms[name] = tuple(dict.fromkeys((first, *fitting)))
        return cls(forms, defaults, tuple(lists))

    def require(self, values: Mapping[str, Any], made: Collection[str] = ()) -> None:
        """Raises ArgumentError if a call has a Python value that the graph was not exported with.

        Args:
            values: The arguments that the call gives, by parameter.
            made: Parameters that the call leaves out, because the outputs of parts are given for them.
        """
        for name, value in values.items():
            found = self._mismatch(name, fingerprint(value))
            if found is not None:
                raise _unlike(found)
        for name, found in self._left_out.items():
            if name not in values and name not in made:
                raise _left_out(name, found, name in self.defaults)

    @functools.cached_property
    def _left_out(self) -> dict[str, Mismatch]:
        """The parameters that a call has to give, as their defaults are not what the graph was exported with."""
        found = {}
        for name, (form, *_) in self.forms.items():
            if name in self.defaults:
                mismatch = self._mismatch(name, self.defaults[name])
            else:
                mismatch = None if has_tensors(form) else Mismatch(name, text_of(form), "nothing")
            if mismatch is not None:
                found[name] = mismatch
        return found

    def _mismatch(self, name: str, value: Fingerprint) -> Mismatch | None:
        forms = self.forms.get(name, ())
        if value in forms:
            return None
        found = [difference(form, value, name, self.lists) for form in forms]
        return next(iter(found), Mismatch(name, "nothing", text_of(value))) if None not in found else None

    def to_json(self) -> dict[str, Any]:
        """Returns the values as JSON data."""
        return {"forms": dict(self.forms), "defaults": dict(self.defaults), "lists": list(self.lists)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PythonValues:
        """Returns the values that `to_json` described."""
        forms = {name: tuple(map(from_json, found)) for name, found in data["forms"].items()}
        defaults = {name: from_json(found) for name, found in data["defaults"].items()}
        return cls(forms, defaults, tuple(data["lists"]))


def _unlike(found: Mismatch) -> ArgumentError:
    hint = "a constant is part of the graph: observe the model with this value, and export again."
    if found.got == "nothing":
        what, hint = "A call has to give this constant.", f"give {found.expected}, with which the graph was exported."
    elif found.expected == "nothing":
        what, hint = "No recorded call gave this value.", "observe a call that gives it, then export again."
    elif "a tensor" in (found.expected, found.got):
        what, hint = (
            "An argument is not of the kind that the graph was exported with.",
            "give it as in the recorded calls.",
        )
    else:
        what = "The graph was exported with another value of this constant."
        if found.expected == found.got:
            hint = (
                "they may differ in what their text does not show, or cannot be compared; export again with this value."
            )
    return ArgumentError(what, where=found.path, expected=found.expected, got=found.got, hint=hint)


def _left_out(name: str, found: Mismatch, has_default: bool) -> ArgumentError:
    what = "A call has to give this constant"
    what += ": left out, it would have another value." if has_default else "."
    return ArgumentError(
        what,
        where=found.path,
        expected=found.expected,
        got=f"{found.got}, the default" if has_default and found.path == name else found.got,
        hint=f"give {found.path}={found.expected}, with which the graph was exported.",
    )
