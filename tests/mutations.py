"""Damaged and hostile JSON: data with a few random changes, as hypothesis strategies."""

import copy

from hypothesis import strategies as st

# What stands in the place of a value: wrong types, sizes that no machine has, paths that lead elsewhere.
JUNK = [
    None, True, False, 0, 1, -1, 2, 7, 10**12, 2**63 - 1, 2**63, -(2**63) - 1, 10**300, 0.5, -0.0, 1e308,
    "", "x", "batch", "float32", "nn", "quint8", "../x", "/etc/passwd", "a/../../b", "a\x00b", "é", "\ud800",
    [], [[]], [0], [-1], [10**12], [1, 2, 3], ["x"], [None], {}, {"x": 1}, {"tensor": 0}, {"tensor": -1},
    {"tensor": True}, {"tuple": []}, {"tuple": 5}, {"dict": [[1, 2], [1, 3]]}, {"registered": "torch:nn", "items": []},
    {"object": "transformers.cache_utils:DynamicCache", "state": [["layers", 5]]}, {"float": "nan"}, {"length": "keys"},
    {"fields": "torch.return_types:max", "items": []}, {"type": "os:system"}, {"enum": "signal:Signals", "name": "x"},
]  # fmt: skip


def _places(data, found):
    """Every container in the data with each of its keys."""
    pairs = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in pairs:
        found.append((data, key))
        if isinstance(value, dict | list):
            _places(value, found)
    return found


def _deep(depth):
    data = []
    for _ in range(depth):
        data = [data]
    return data


@st.composite
def mutated(draw, original):
    """Data with one to three changes: values replaced, removed, doubled, swapped, or nested deeply."""
    data = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        places = _places(data, [])
        if not places:
            break
        container, key = places[draw(st.integers(0, len(places) - 1))]
        change = draw(st.sampled_from(["junk", "junk", "junk", "near", "remove", "rename", "double", "swap", "deep"]))
        value = container[key]
        if change == "junk":
            container[key] = copy.deepcopy(draw(st.sampled_from(JUNK)))
        elif change == "near" and type(value) is int:
            container[key] = value + draw(st.sampled_from([-1, 1, 10**12]))
        elif change == "near" and isinstance(value, str):
            container[key] = value[:-1]
        elif change == "remove":
            del container[key]
        elif change == "rename" and isinstance(container, dict):
            container[draw(st.sampled_from(["x", "", "path"]))] = container.pop(key)
        elif change == "double" and isinstance(container, list):
            container.append(copy.deepcopy(value))
        elif change == "swap":
            other, place = places[draw(st.integers(0, len(places) - 1))]
            container[key] = copy.deepcopy(other[place]) if place in other or isinstance(other, list) else None
        elif change == "deep":
            container[key] = _deep(400)
    return data
