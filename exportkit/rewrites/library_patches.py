"""The export-time patches and ONNX translations that transformers itself maintains, behind one adapter.

They are tried where a plain export fails, as a whole, since most models need none of them. In comes nothing but the
backends' names; out come a context in which the patches are in force, and what a translation to ONNX needs besides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from exportkit._torch_compat.transformers import exporter_patches, exporter_translations
from exportkit.rewrites.attributes import replaced_attributes


@contextlib.contextmanager
def library_patches(_model: torch.nn.Module) -> Iterator[None]:
    """Puts transformers' patches in force, and takes them back without a trace; none if it has none."""
    with contextlib.ExitStack() as stack:
        for backend in ("dynamo", "onnx"):
            for target, name, make in exporter_patches(backend):
                stack.enter_context(replaced_attributes(target, {name: make(getattr(target, name))}))
        yield


@dataclass(frozen=True)
class LibraryTranslations:
    """What transformers adds to a translation to ONNX.

    Attributes:
        table: Functions that translate operators.
        fix_nodes: Changes the nodes of a traced module in place.
        fix_program: Changes a translated program in place.
    """

    table: Mapping[Any, Any]
    fix_nodes: Callable[[torch.fx.GraphModule], None]
    fix_program: Callable[[Any], None]


def library_translations() -> LibraryTranslations | None:
    """Returns transformers' translations, or None where it is not installed or has none."""
    found = exporter_translations()
    return None if found is None else LibraryTranslations(*found)
