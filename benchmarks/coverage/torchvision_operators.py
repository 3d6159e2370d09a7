"""Operators of torchvision in Python, for an installation whose compiled ones need a CUDA build of torch."""

import torch

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def define() -> None:
    """Defines what torchvision needs to be imported, if its own operators cannot be loaded."""
    import importlib.util

    if importlib.util.find_spec("torchvision") is None:
        return
    folder = importlib.util.find_spec("torchvision").submodule_search_locations[0]
    try:
        torch.ops.load_library(f"{folder}/_C.so")
    except OSError:
        _define()


def _define() -> None:
    for name in ("nms", "qnms"):
        _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARY.impl("nms", _nms, "CPU")
    import torchvision.ops.boxes

    torchvision.ops.boxes._assert_has_ops = lambda: None


def _nms(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Which boxes to keep: from the best on, each that does not overlap much with one that is kept."""
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    kept: list[int] = []
    for index in scores.argsort(descending=True, stable=True).tolist():
        corners = torch.maximum(boxes[kept, :2], boxes[index, :2]), torch.minimum(boxes[kept, 2:], boxes[index, 2:])
        shared = (corners[1] - corners[0]).clamp(min=0).prod(-1)
        if not bool((shared / (areas[kept] + areas[index] - shared) > iou_threshold).any()):
            kept.append(index)
    return torch.tensor(kept, dtype=torch.long)
