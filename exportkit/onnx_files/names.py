"""Names of graph inputs and outputs, as onnxruntime-genai and optimum know them.

``past_key_values.layers[0].keys`` is ``past_key_values.0.key`` as an input and ``present.0.key`` as an output; in an
encoder-decoder cache ``past_key_values.0.decoder.key`` and ``past_key_values.0.encoder.key``. Any other path keeps its
parts, joined by dots: ``data.inner.scale``, ``extras.0``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_HALVES = {"self_attention_cache": "decoder", "cross_attention_cache": "encoder"}
_STATES = {"keys": "key", "values": "value"}
_CACHE = re.compile(
    r"^(?:(?P<root>.*?)\.)?(?:(?P<half>self_attention_cache|cross_attention_cache)\.)?layers\[(?P<layer>\d+)\]\.(?P<state>.+)$"
)


def input_names(paths: Sequence[str]) -> list[str]:
    """Returns the graph's name for each input leaf."""
    return _unique([_name(path, None) for path in paths], taken=())


def output_names(paths: Sequence[str], inputs: Iterable[str]) -> list[str]:
    """Returns the graph's name for each output leaf; a name that an input has too gets the prefix ``output.``."""
    taken = set(inputs)
    names = []
    for path in paths:
        name = _name(path, "present")
        name = f"output.{name.removeprefix('[')}" if name in taken or name[:1].isdigit() else name
        names.append(name or "output")
    return _unique(names, taken)


def _name(path: str, cache_root: str | None) -> str:
    """A name without brackets; the caches of outputs are called ``cache_root``."""
    match = _CACHE.match(path)
    if match is None:
        return _dotted(path)
    root = cache_root or _dotted(match["root"] or "past_key_values")
    half = f".{_HALVES[match['half']]}" if match["half"] else ""
    return f"{root}.{match['layer']}{half}.{_STATES.get(match['state'], _dotted(match['state']))}"


def _dotted(path: str) -> str:
    return re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", path).strip(".")


def _unique(names: Sequence[str], taken: Iterable[str]) -> list[str]:
    seen = set(taken)
    found = []
    for name in names:
        unique = next(n for n in (name, *(f"{name}_{i}" for i in range(2, len(names) + 3))) if n not in seen)
        seen.add(unique)
        found.append(unique)
    return found
