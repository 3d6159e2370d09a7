"""The calls of one method as they were seen, and what went wrong while they were recorded."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from exportkit.calls.call import Call
from exportkit.calls.signature import Signature
from exportkit.errors import NoCallsError, ObservationError
from exportkit.json_data import Size, read
from exportkit.plan.leaves import is_below
from exportkit.trees import Tree, check_opened, first_name, flatten, join, unfilled_layers
from exportkit.trees.structure import path_of


@dataclass(frozen=True)
class SeenShapes:
    """Shapes that one call had, or several calls.

    Attributes:
        inputs: Shape of each input tensor by full path.
        outputs: Shape of each output tensor by its path in what the method returned.
        count: Number of calls that had these shapes.
        constants: Numbers, flags and texts that were arguments, by path, of calls that are not stored.
    """

    inputs: Mapping[str, tuple[Size, ...]]
    outputs: Mapping[str, tuple[Size, ...]]
    count: Size = 1
    constants: Mapping[str, bool | int | float | str] = field(default_factory=dict)

    def without(self, names: set[str], catch_all: str | None) -> SeenShapes:
        """Returns the same shapes without the arguments of these names, of which ``catch_all`` may hold some."""
        roots = [*names, *(path_of((name,), catch_all) for name in names if catch_all is not None)]

        def is_kept(path: str) -> bool:
            return not any(is_below(path, root) for root in roots)

        inputs = {path: shape for path, shape in self.inputs.items() if is_kept(path)}
        constants = {path: value for path, value in self.constants.items() if is_kept(path)}
        return replace(self, inputs=inputs, constants=constants)


@dataclass(frozen=True)
class WrittenArgument:
    """An argument that a method changes in place.

    Attributes:
        place: Path of the argument in what the method returns; None if it is not returned.
        in_place: Paths in the argument of tensors whose elements change; its other leaves are replaced.
    """

    place: str | None
    in_place: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """A call that raised: its error and its arguments, as text."""

    error: str
    arguments: str


@dataclass(frozen=True, repr=False)
class Observation:
    """The stored calls of one method, and what went wrong while storing them.

    Attributes:
        signature: Parameters of the observed method.
        calls: Calls that returned, in the order in which they began.
        failures: Calls that raised.
        problems: What exportkit itself could not record; the model's own calls were not affected.
        method_name: Name of the observed method.
        model_name: Class of the observed model.
        removed: Inputs that the user left out.
        restored: Inputs that no call had and that were added afterwards.
        has_values: Whether the tensors hold the recorded values; if not, only their shapes and dtypes were recorded.
        further: Shapes of the calls that returned and are not stored, with the number of calls that had them.
        written: Arguments that the method changes in place, by name; known once the model has been run for this.
        target: Path in the model of the method that a graph for these calls stands in for; ``__call__`` if hooks of the
            model are part of the graph. Known once the model has been run for this.
        called_instead: Methods of the model that were called where the observed one was not, with the number of calls.
        modules_called: Modules inside of the model that were called then, by path, with the number of calls.
    """

    signature: Signature
    calls: tuple[Call, ...]
    failures: tuple[Failure, ...] = ()
    problems: tuple[str, ...] = ()
    method_name: str = "forward"
    model_name: str = "model"
    removed: frozenset[str] = frozenset()
    restored: frozenset[str] = frozenset()
    has_values: bool = True
    further: tuple[SeenShapes, ...] = ()
    written: Mapping[str, WrittenArgument] = field(default_factory=dict)
    target: str = ""
    called_instead: Mapping[str, int] = field(default_factory=dict)
    modules_called: Mapping[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        values = "" if self.has_values else ", shapes only"
        return f"Observation({self.target_name}, {len(self.calls)} calls{values})"

    @property
    def target_name(self) -> str:
        """The class of the model and the name of the method, for messages."""
        return f"{self.model_name}.{self.method_name}"

    @property
    def calls_with_values(self) -> tuple[Call, ...]:
        """The calls, if their tensors hold the values that were seen; otherwise none."""
        return self.calls if self.has_values else ()

    def require_calls(self) -> None:
        """Raises NoCallsError if no call was stored, ObservationError if recording failed every time."""
        if self.calls:
            return
        if self.failures:
            raise ObservationError(
                "No inputs were captured. Every observed call raised.",
                where=self.target_name,
                got=self.failures[0].error,
                hint="make the model run once before it is exported.",
            )
        if self.problems:
            raise ObservationError(
                "No inputs were captured. The calls could not be recorded.",
                where=self.target_name,
                got=self.problems[0],
            )
        if (self.called_instead or self.modules_called) and not self.further:
            called = " and ".join(f"`{name}`" for name in self.called_instead or self.modules_called)
            raise NoCallsError(
                f"No inputs were captured. {called} was called, `{self.method_name}` was not.",
                where=self.target_name,
                hint=self._what_to_observe(),
            )
        raise NoCallsError(
            "No inputs were captured.",
            where=self.target_name,
            hint="run the model inside `with observer(model):`; generate, a pipeline or plain calls will do. Calls "
            "that torch.compile has compiled pass an observer inside: observe the module that torch.compile returned, "
            "or run the model uncompiled (without model.compile()).",
        )

    def _what_to_observe(self) -> str:
        """What to observe instead of a method that was not called: another, or the module that it calls in a loop."""
        methods, modules = self.called_instead, self.modules_called
        most = sorted(modules, key=lambda path: -modules[path])[:1]
        inner = ""
        for path in most:
            is_plain = all(map(str.isidentifier, path.split(".")))
            place = f"model.{path}" if is_plain else f"model.get_submodule({path!r})"
            inner = f"`with observer({place}):`; for exportkit run: --observe NAME.{path}"
        if not methods:
            return f"observe that module: {inner}."
        method = next(iter(methods))
        if most and modules[most[0]] > sum(methods.values()):
            whole = f"To export `{method}` as a whole, pass method_name={method!r}."
            return f"observe the module that it calls: {inner}. {whole}"
        this = (
            f"observe that method: pass method_name={method!r}, or (model, {method!r}) among several modules; for "
            f"exportkit run, add it to the name: --observe NAME.{method}."
        )
        return f"{this} If it only organises calls of a module inside, observe that module: {inner}." if inner else this

    @functools.cached_property
    def seen(self) -> tuple[SeenShapes, ...]:
        """Shapes of all calls that returned, stored or not, with the number of calls that had them."""
        found: dict[Any, SeenShapes] = {}
        stored = [
            SeenShapes(call.shapes(), dict(zip(call.outputs.tensor_paths, call.outputs.shapes(), strict=True)))
            for call in self.calls
        ]
        for one in [*stored, *self.further]:
            key = tuple(one.inputs.items()), tuple(one.outputs.items())
            before = found.get(key)
            count = one.count if before is None else before.count + one.count
            found[key] = replace(one, count=count, constants={})
        return tuple(found.values())

    def tensor_paths(self) -> list[str]:
        """Returns the paths of all input tensors of all calls, in signature order, then in order of appearance."""
        by_name: dict[str, dict[str, None]] = {name: {} for name in self.signature.names}
        for call in self.calls:
            for name, tree in call.arguments.items():
                by_name[name] |= dict.fromkeys(join(name, path) for path in tree.tensor_paths)
        return [path for paths in by_name.values() for path in paths]

    def completed(self, value_if_missing: Mapping[str | int, Any]) -> Observation:
        """Returns the same calls, with ``value_if_missing`` for the arguments that a call lacks."""
        if not value_if_missing:
            return self
        calls = []
        for call in self.calls:
            found = dict(call.arguments)
            for key, value in value_if_missing.items():
                self._set_missing(found, key, value)
            ordered = self.signature.in_order(found)
            calls.append(replace(call, arguments=ordered))
        return replace(self, calls=tuple(calls))

    def with_filled_caches(self) -> Observation:
        """Returns the same calls with zeros in cache layers of a fixed length that held no tensors yet.

        The model makes these zeros itself: a first call is one with an empty cache then, like any other call.
        """
        filled: set[str] = set()
        calls = []
        for call in self.calls:
            changed = {}
            for name, tree in call.arguments.items():
                if not _has_unfilled_layer(tree.tensor_paths):  # tensors are only loaded where they are needed
                    continue
                value, returned, paths = tree.build(), call.outputs.tensors(), list[str]()
                for path, layer in unfilled_layers(value):
                    keys, values = (_ending_with(f"{path}.{part}", returned) for part in ("keys", "values"))
                    if keys is not None and values is not None:
                        layer.lazy_initialization(returned[keys], returned[values])
                        paths += [join(name, f"{path}.{part}") for part in ("keys", "values")]
                if paths:
                    changed[name] = flatten(value)
                    filled.update(paths)
            calls.append(replace(call, arguments={**call.arguments, **changed}) if changed else call)
        if not filled:
            return self
        further = []
        for seen in self.further:
            sources = {path: _ending_with(path.partition(".")[2], seen.outputs) for path in filled - seen.inputs.keys()}
            shapes = {path: seen.outputs[source] for path, source in sources.items() if source is not None}
            further.append(replace(seen, inputs={**seen.inputs, **shapes}))
        return replace(self, calls=tuple(calls), further=tuple(further))

    def _set_missing(self, arguments: dict[str, Tree], key: str | int, value: Any) -> None:
        catch_all = self.signature.var_keyword
        if catch_all is not None and key not in self.signature.names and isinstance(key, str):
            extra = arguments[catch_all].build() if catch_all in arguments else {}
            if extra.get(key) is None:
                arguments[catch_all] = flatten({**extra, key: value})
            return
        name = self.signature.name_of(key)
        if name not in arguments or all(leaf is None for leaf in arguments[name].leaves):
            arguments[name] = flatten(value)

    def without(self, names: set[str]) -> Observation:
        """Returns the same calls without the arguments of these names, those in ``**kwargs`` included."""
        if not names:
            return self
        further = tuple(shapes.without(names, self.signature.var_keyword) for shapes in self.further)
        kept = tuple(call.without(names) for call in self.calls)
        return replace(self, calls=kept, removed=self.removed | names, further=further)

    def constants_of(self, seen: SeenShapes) -> dict[str, Tree]:
        """Returns the constants of calls that are not stored, by parameter."""
        found: dict[str, Any] = {}
        for path, value in seen.constants.items():
            first = first_name(path)
            step = path.removeprefix(first)
            if step:  # one of those in ``**kwargs``: ``.key`` or ``['key']``
                found.setdefault(first, {})[step[1:] if step[0] == "." else step[2:-2]] = value
            else:
                found[first] = value
        return {name: flatten(value) for name, value in found.items()}

    @functools.cached_property
    def merged_arguments(self) -> Mapping[str, Tree]:
        """The tree with the most tensors for each argument that some call gave; the first one if several have as many.

        Arguments that were only ever None are left out, unless they are required.

        Raises:
            UnregisteredClassError: if an argument is an object that holds tensors out of reach.
        """
        best: dict[str, Tree] = {}
        for name in self.signature.names:
            trees = [call.arguments[name] for call in self.calls if name in call.arguments]
            if not trees:
                continue
            tree = max(trees, key=_fullness)
            is_none = tree.paths == ("",) and tree.constants().get("", ...) is None
            if not is_none or self.signature.defaults.get(name, ...) is not None:
                best[name] = tree
        for name, tree in best.items():
            check_opened(name, tree)
        return best

    @property
    def always_named(self) -> frozenset[str]:
        """The parameters that no call gave by position."""
        return frozenset(self.signature.names).difference(*(call.arguments.keys() - call.named for call in self.calls))

    @property
    def merged_call(self) -> Call:
        """The call, not made, with `merged_arguments`."""
        gradients = any(call.gradients for call in self.calls)
        autocast = next((call.autocast for call in self.calls if call.autocast), ())
        seed = next((call.seed for call in self.calls if call.seed is not None), None)
        return Call(self.merged_arguments, self.signature, gradients=gradients, autocast=autocast, seed=seed)

    def without_seeds(self) -> Observation:
        """Returns the calls for a comparison in which random numbers are random."""
        if all(call.seed is None for call in self.calls):
            return self
        return replace(self, calls=tuple(replace(call, seed=None) for call in self.calls))

    def save(self, directory: str | os.PathLike[str], values: bool = True) -> None:
        """Writes the observation to a directory, to plan and export on another machine without the inputs.

        Args:
            directory: A new or empty directory, or one that holds an observation, which is replaced.
            values: Also write the values of the tensors, not only their shapes and dtypes.

        Raises:
            DestinationError: if the directory cannot be written, or holds something else.
            ObservationError: if a tensor is of a kind that cannot be written, such as a sparse one.
            TreeError: if a container is of a class that cannot be found by its name.
        """
        from exportkit.calls.storage import save_calls

        about = {
            "model_name": self.model_name,
            "method_name": self.method_name,
            "removed": sorted(self.removed),
            "restored": sorted(self.restored),
            "problems": list(self.problems),
            "failures": [{"error": failure.error, "arguments": failure.arguments} for failure in self.failures],
            "further": [{each.name: getattr(seen, each.name) for each in fields(seen)} for seen in self.further],
        }
        # made-up values are not written as if they had been seen
        save_calls(self.signature, self.calls, about, directory, values and self.has_values)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Observation:
        """Returns the observation that `save` wrote; all tensors are on the CPU.

        If only shapes were written, the values are made up: ones for integers and booleans, otherwise numbers between
        0.1 and 1, and `has_values` is False. Constants that JSON cannot hold come back as placeholders.

        Args:
            directory: The directory.

        Raises:
            DestinationError: if there is no observation, or a file of it is missing.
            ObservationError: if a file is damaged, or has a different version.
            TreeError: if a class is missing, because it was not imported or not registered with torch's pytree.
        """
        from exportkit.calls.storage import JSON, damaged, load_calls
        from exportkit.files import reading

        signature, calls, data = load_calls(directory)
        with reading(Path(directory) / JSON, damaged):
            about = {name: read(kind, data[name]) for name, kind in _ABOUT.items()}
        return cls(signature, calls, has_values=data["values"], **about)


def _has_unfilled_layer(paths: Collection[str]) -> bool:
    """Whether a layer of a fixed length, which counts tokens in a tensor from the start, has no keys yet."""
    return any(path.endswith(".cumulative_length") and f"{path.rpartition('.')[0]}.keys" not in paths for path in paths)


def _ending_with(path: str, others: Iterable[str]) -> str | None:
    return next((other for other in others if other.endswith(path)), None)


# What is saved beside the signature and the calls.
_ABOUT = {
    "failures": tuple[Failure, ...],
    "problems": tuple[str, ...],
    "method_name": str,
    "model_name": str,
    "removed": frozenset[str],
    "restored": frozenset[str],
    "further": tuple[SeenShapes, ...],
}


def _fullness(tree: Tree) -> tuple[int, bool]:
    """How much an argument holds: its number of tensors, and whether it holds anything but None."""
    count = len(tree.tensor_paths)
    return count, bool(count) or any(leaf is not None for leaf in tree.constants().values())
