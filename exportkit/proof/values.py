"""Compares what is not a tensor in the outputs: Python values by type and value, containers by what they hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from exportkit.onnx_files.graph import OnnxGraph
from exportkit.running.compare import Difference, close
from exportkit.trees import Tree, fingerprint, text_of
from exportkit.trees.constants import difference, noted_values

_TENSOR = torch.empty(0)


def value_differences(graph: OnnxGraph, expected: Tree, got: Tree) -> Iterator[Difference]:
    """Yields a difference for each Python value that is not what the model returned; tensors are not compared.

    Numbers that the graph computes from tensors are compared like float32, which rounds in the graph as elsewhere.

    Args:
        graph: The graph.
        expected: What the model returned.
        got: What the graph returned.
    """
    wanted, found = (dict(zip(tree.paths, tree.leaves, strict=True)) for tree in (expected, got))
    computed = [path for path in graph.contract.numbers if path in wanted or path in found]
    for path in computed:
        if not _are_close(wanted.get(path), found.get(path)):
            yield _difference(path, repr(wanted.get(path)), repr(found.get(path)))
    for path, noted in noted_values(expected).items():
        if path in found and noted != fingerprint(found[path]):
            yield _difference(path, text_of(noted), text_of(fingerprint(found[path])))
    compared = dict.fromkeys((*computed, *noted_values(expected)), _TENSOR)
    before, after = (fingerprint(tree.with_leaves(compared).build()) for tree in (expected, got))
    mismatch = difference(before, after, lists=graph.contract.joined_outputs, recorded=True)
    if mismatch is not None:
        yield _difference(*mismatch)


def _are_close(expected: Any, got: Any) -> bool:
    if type(expected) is not float or type(got) is not float:
        return fingerprint(expected) == fingerprint(got)
    return close(torch.tensor(expected), torch.tensor(got))


def _difference(path: str, expected: str, got: str) -> Difference:
    return Difference(path, f"{expected} became {got}", math.nan)
