"""Attention that returns its weights. In come the modules to record; while they are, attention is computed eagerly.

Fused attention never has the weights. Which one is computed is read from a config that layers and threads share, and
the mask is made for it; so the config answers "eager" to the calls that capture weights, and what it is to all others.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from exportkit import _torch_compat
from exportkit.module_outputs import scope
from exportkit.module_outputs.specs import Match
from exportkit.rewrites.attributes import replaced_attributes

if TYPE_CHECKING:
    from exportkit.module_outputs.collector import Collector

EAGER = "eager"
ATTRIBUTE = "_attn_implementation"

_lock = threading.Lock()
_properties: dict[type, property] = {}
_switched: Counter[int] = Counter()  # configs (by id) of the collectors that are entered


def fused_configs(model: torch.nn.Module, matches: Sequence[Match]) -> list[Any]:
    """Returns the configs that must say "eager" for the matched modules to return attention weights.

    These are the configs of the modules, of what is inside them, and of what they are inside of, which makes the mask.
    """
    wanted = [match for match in matches if _wants_weights(match)]
    around = dict.fromkeys(path for match in wanted for path in _paths_around(match.path))
    modules: dict[torch.nn.Module, Any] = dict.fromkeys(map(model.get_submodule, around))
    for match in wanted:
        modules |= _torch_compat.paths_of_modules(match.module)
    configs: dict[int, Any] = {}
    for module in modules:
        config = vars(module).get("config")  # most have none, which getattr takes long to say
        configs[id(config)] = config
    return [
        config for config in configs.values() if _torch_compat.attention_implementation(config) not in (None, EAGER)
    ]


def _paths_around(path: str) -> Iterator[str]:
    """The paths of the modules that a module is inside of, the model first."""
    yield ""
    for end, letter in enumerate(path):
        if letter == ".":
            yield path[:end]


@contextlib.contextmanager
def eager_attention(collector: Collector) -> Iterator[None]:
    """Lets the configs say "eager" to calls that the collector records."""
    configs = fused_configs(collector.model, collector.matches)
    with contextlib.ExitStack() as stack:
        for config in configs:
            stack.enter_context(_answering(config))
        collector.eager = frozenset(map(id, configs))
        yield


def _wants_weights(match: Match) -> bool:
    names = f"{match.target.key} {type(match.module).__name__}".lower()
    return "attention" in names and match.target.recorder.index != 0


@contextlib.contextmanager
def _answering(config: Any) -> Iterator[None]:
    found = _torch_compat.attention_property(config)
    with _counted(config):
        if found is None:
            with _plain_attribute(config):
                yield
        else:
            with _lock:
                switching = _switching(*found)
            with replaced_attributes(found[0], {ATTRIBUTE: switching}):
                yield


@contextlib.contextmanager
def _counted(config: Any) -> Iterator[None]:
    with _lock:
        _switched[id(config)] += 1
    try:
        yield
    finally:
        with _lock:
            _switched[id(config)] -= 1
            if not _switched[id(config)]:
                del _switched[id(config)]


def _switching(cls: type, current: property) -> property:
    """The property that answers by who asks; one for each class, however many captures are open."""
    if _properties.get(cls) is current:
        return current
    read, write = current.fget, current.fset

    def answer(config: Any) -> Any:
        return EAGER if _asked_by_capture(config) else read(config)  # type: ignore[misc]

    _properties[cls] = property(answer, write)
    return _properties[cls]


def _asked_by_capture(config: Any) -> bool:
    if torch.compiler.is_dynamo_compiling():
        return _switched.get(id(config), 0) > 0
    collectors = [frame.collector for frame in scope.frames() or ()]
    return any(id(config) in collector.eager for collector in collectors if collector is not None)


_plain: dict[int, tuple[Any, int]] = {}  # what a config said, and how many captures are open


@contextlib.contextmanager
def _plain_attribute(config: Any) -> Iterator[None]:
    """Changes the attribute for everybody: such a config has nothing to ask by."""
    with _lock:
        before, users = _plain.get(id(config), (getattr(config, ATTRIBUTE), 0))
        _plain[id(config)] = (before, users + 1)
        setattr(config, ATTRIBUTE, EAGER)
    try:
        yield
    finally:
        with _lock:
            before, users = _plain.pop(id(config))
            if users > 1:
                _plain[id(config)] = (before, users - 1)
            else:
                setattr(config, ATTRIBUTE, before)
