"""Parts: submodules and methods that run before the model itself, and whose outputs it is given as inputs.

A part, such as an image or audio encoder, has an observation of its own, and edges that say which of its outputs went
into which inputs of the model.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from exportkit._torch_compat.modules import forward_of
from exportkit.calls.call import Call
from exportkit.calls.method_wrapper import Nesting, attach
from exportkit.calls.observation import Observation
from exportkit.calls.recorder import Recorder
from exportkit.calls.signature import Signature
from exportkit.errors import InvalidRequestError, InvalidTypeError, UnknownMethodError
from exportkit.trees import join
from exportkit.trees.structure import LIST_MEMBER

DEPTH = 3  # steps from the model down to the submodules that are recorded
_FEATURES = re.compile(r"get_\w+_features")  # the name of methods that return the features of one modality
_SUFFIX = ".forward"

Wanted = Literal["auto"] | Sequence[str]


@dataclass(frozen=True)
class Edge:
    """An output of a part that is an input of the model.

    Attributes:
        source: Path in what the part returns: of a leaf, or of a list of which each element goes to the same place.
        target: Path in the model's inputs.
    """

    source: str
    target: str

    def renamed(self, path: str) -> str | None:
        """Returns the path in the model's inputs for a path in what the part returns; None if it goes nowhere."""
        rest = path.removeprefix(self.source)
        return self.target + rest if path.startswith(self.source) and rest[:1] in ("", "[", ".") else None


@dataclass(frozen=True)
class Part:
    """A method that ran outside of the observed one, and whose outputs are inputs of it.

    Attributes:
        name: Its name, which is also the name of its file.
        module: Path of the module inside the model; "" is the model itself.
        observation: Its calls.
        edges: Which outputs the model was given.
    """

    name: str
    module: str
    observation: Observation
    edges: tuple[Edge, ...]


class PartRecorder:
    """Records calls of submodules and methods of a model that no other part makes.

    Args:
        model: The model.
        method_name: Its observed method.
        wanted: Paths of submodules (``encoder``) or methods (``get_image_features``), also where the observed method
            calls them; "auto" for all that may be parts, while the observed method does not run.

    Attributes:
        is_auto: Whether parts are those that feed the model, and not named.
    """

    def __init__(self, model: torch.nn.Module, method_name: str, wanted: Wanted) -> None:
        self._nesting = Nesting()
        self._root = model, method_name
        self._made_of: list[Observation] = []  # what the parts below were made of: comparing all values takes long
        self._parts: dict[str, Part] = {}
        self.is_auto = wanted == "auto"
        targets = _candidates(model, method_name) if wanted == "auto" else _named(model, wanted)
        others = [target for target in targets if target != self._root]
        self._listeners = {target: _Outermost(_recorder(*target), self._nesting) for target in others}

    @contextlib.contextmanager
    def recording(self, store_n_calls: int, max_bytes: int | None) -> Iterator[None]:
        """Records for the time of a ``with`` block; afterwards the model is as it was."""
        with contextlib.ExitStack() as stack:
            if self.is_auto:
                stack.callback(attach(*self._root, _Outermost(None, self._nesting).call).leave)
            for (module, method), listener in self._listeners.items():
                listener.recorder.allow(store_n_calls, max_bytes=max_bytes)
                stack.callback(attach(module, method, listener.call).leave)
            yield

    @property
    def problems(self) -> tuple[str, ...]:
        """What could not be recorded."""
        return tuple(f"{name}: {text}" for name, one in self._by_name() for text in one.recorder.problems)

    @property
    def limits(self) -> tuple[str, ...]:
        """Which limits were reached, and which parts were named and never called, not even by other parts."""
        reached = [f"{name}: {text}" for name, one in self._by_name() for text in one.recorder.limits]
        unheard = [name for name, one in self._by_name() if not one.was_called and not self.is_auto]
        return (*reached, *(f"The part {name!r} was not called." for name in unheard))

    def _paths(self) -> dict[int, str]:
        return {id(module): path for path, module in self._root[0].named_modules()}

    def _by_name(self) -> list[tuple[str, _Outermost]]:
        paths = self._paths()
        named = {(paths.get(id(m), type(m).__name__), method): one for (m, method), one in self._listeners.items()}
        return [(join(path, method), one) for (path, method), one in named.items()]

    def parts(self, observation: Observation) -> dict[str, Part]:
        """Returns the parts that ran, by name; with "auto", only those that fed the model.

        Args:
            observation: The calls of the model itself.
        """
        recorders = {target: listener.recorder for target, listener in self._listeners.items()}
        heard = {target: recorder.observation() for target, recorder in recorders.items() if recorder.num_calls()}
        made_of = [observation, *heard.values()]
        if [*map(id, made_of)] != [*map(id, self._made_of)]:
            found, paths = dict[str, Part](), self._paths()
            for (module, method), own in heard.items():
                edges = find_edges(own, observation)
                if edges or not self.is_auto:
                    name = part_name(paths[id(module)], method, found)
                    found[name] = Part(name, paths[id(module)], own, edges)
            self._made_of, self._parts = made_of, found
        return dict(self._parts)


class _Outermost:
    """Passes on to a recorder the calls that were not made by another recorded call."""

    def __init__(self, recorder: Any, nesting: Nesting) -> None:
        self.recorder, self._nesting = recorder, nesting
        self.was_called = False

    def call(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.was_called = True
        if self._nesting.inside:
            return method(*args, **kwargs)
        with self._nesting:
            return method(*args, **kwargs) if self.recorder is None else self.recorder.call(method, args, kwargs)


def find_edges(part: Observation, whole: Observation) -> tuple[Edge, ...]:
    """Returns which outputs of a part went into which inputs of the model, as their values show.

    Args:
        part: Calls of the part.
        whole: Calls of the model.
    """
    edges: dict[Edge, None] = {}
    for target in whole.tensor_paths():
        calls = [call for call in whole.calls if target in call.tensors()]
        sources = (path for call in part.calls for path in call.outputs.tensors())
        source = next((path for path in dict.fromkeys(sources) if _feeds(part.calls, path, calls, target)), None)
        if source is not None:
            edges[_edge(source, target)] = None
    return tuple(edges)


def _edge(source: str, target: str) -> Edge:
    """The edge between two leaves, or between the lists that hold them at the same position."""
    a, b = LIST_MEMBER.match(source), LIST_MEMBER.match(target)
    return Edge(a["list"], b["list"]) if a and b and a["index"] == b["index"] else Edge(source, target)


def _feeds(parts: Sequence[Call], source: str, calls: Sequence[Call], target: str) -> bool:
    """Whether each call was given, at ``target``, what a call of the part returned at ``source``."""
    made = [tensors[source] for part in parts if source in (tensors := part.outputs.tensors())]
    return all(any(_equal(tensor, call.tensors()[target]) for tensor in made) for call in calls)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.is_floating_point() and a.numel() > 0 and a.dtype == b.dtype and torch.equal(a, b)


def _recorder(module: torch.nn.Module, method: str) -> Recorder:
    return Recorder(Signature.of(getattr(module, method)), method, type(module).__name__)


def _candidates(model: torch.nn.Module, method_name: str) -> Iterator[tuple[torch.nn.Module, str]]:
    """Yields the submodules near the root, and the methods there that return features of a modality."""
    for path, module in model.named_modules():
        if path.count(".") >= DEPTH:
            continue
        yield from ((module, name) for name in dir(type(module)) if _FEATURES.fullmatch(name) and name != method_name)
        if path and forward_of(module) not in (None, torch.nn.Module.forward):
            yield module, "forward"


def _named(model: torch.nn.Module, wanted: Sequence[str]) -> Iterator[tuple[torch.nn.Module, str]]:
    if not isinstance(wanted, list | tuple | set) or not all(isinstance(path, str) for path in wanted):
        raise InvalidTypeError(
            "Parts must be given by their paths in the model.",
            where="parts",
            expected='"auto", or a list such as ["encoder", "get_image_features"]',
            got=repr(wanted),
        )
    for path in wanted:
        owner, _, last = path.removesuffix(_SUFFIX).rpartition(".")
        module: Any = model
        try:
            module = model.get_submodule(owner)
            found = getattr(module, last)
        except AttributeError:
            known = ", ".join(name for name, _ in model.named_modules() if name and name.count(".") < DEPTH)
            raise UnknownMethodError(
                f"{type(model).__name__} has no submodule or method {path!r}.", where="parts", expected=known, got=path
            ) from None
        if isinstance(found, torch.nn.Module):
            yield found, "forward"
        elif callable(found):
            yield module, last
        else:
            raise InvalidRequestError(f"{path!r} is neither a submodule nor a method.", where="parts", got=repr(found))


def part_name(path: str, method: str, taken: Collection[str], with_module: bool = False) -> str:
    """Returns the name of a part: image_features for ``get_image_features``, encoder for ``model.encoder``.

    Args:
        path: Path of its module.
        method: Its method.
        taken: Names of other parts.
        with_module: Begin the name of a method with that of its module: vae_decode.
    """
    last, short = path.rpartition(".")[2], method.removeprefix("get_")
    name = re.sub(r"\W", "_", last if method == "forward" else f"{last}_{short}" if with_module and last else short)
    if name in taken:
        name = re.sub(r"\W", "_", path if method == "forward" else f"{path}_{short}")
    while name in taken:
        name += "_"
    return name
