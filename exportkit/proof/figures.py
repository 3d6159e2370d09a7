"""How far the outputs of a quantised graph are from those of the model, in figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from exportkit.onnx_files.quantised import Quantised
from exportkit.plan.tables import aligned
from exportkit.running.compare import distance


@dataclass(frozen=True)
class Figures:
    """How far an output is from the model's.

    Attributes:
        error: Root mean square error, divided by the root mean square of the model's output; the share of elements that
            differ if these are integers; infinity for an output of a different shape.
        elements: Number of elements that were compared.
        top1: For logits, the share of positions at which the largest one is the model's; None for other outputs.
        kl: For logits, the mean Kullback-Leibler divergence from the model's distribution, in nats.
        positions: Number of positions at which logits were compared.
    """

    error: float
    elements: int
    top1: float | None = None
    kl: float | None = None
    positions: int = 0

    @property
    def text(self) -> str:
        """The figures in words."""
        logits = [] if self.top1 is None else [f"top-1 agreement {self.top1:.4f}", f"KL divergence {self.kl:.2g}"]
        return ", ".join([*logits, f"error {self.error:.2g}"])


def figures_of(expected: torch.Tensor, got: torch.Tensor, hidden: torch.Tensor | None, is_logits: bool) -> Figures:
    """Returns how far an output is from the model's.

    Args:
        expected: What the model returned.
        got: What the graph returned, of the same shape.
        hidden: Infinity for elements that say nothing, because padding decides about them; ready to broadcast.
        is_logits: Whether the last axis has the logits of one choice.
    """
    visible = None if hidden is None else ~hidden.isinf().expand(expected.shape)
    elements = expected.numel() if visible is None else int(visible.sum())
    error = distance(expected, got, visible).rms if elements else 0.0
    if not is_logits or not elements or not expected.is_floating_point():
        return Figures(error, elements)
    rows = [tensor.detach().to(torch.float32).reshape(-1, expected.shape[-1]) for tensor in (expected, got)]
    if visible is not None:
        kept = visible.reshape(-1, expected.shape[-1]).any(-1)
        rows = [tensor[kept] for tensor in rows]
    wanted, found = (tensor.log_softmax(-1) for tensor in rows)
    apart = torch.where(wanted.exp() > 0, wanted.exp() * (wanted - found), 0.0)
    agree = rows[0].argmax(-1) == rows[1].argmax(-1)
    kl = max(apart.sum(-1).mean().item(), 0.0)
    return Figures(error, elements, agree.to(torch.float64).mean().item(), kl, len(rows[0]))


def together(figures: Iterable[Figures]) -> Figures | None:
    """Returns the figures of one output in several calls together; None for no calls."""
    found = [item for item in figures if item.elements]
    elements = sum(item.elements for item in found)
    if not elements:
        return None
    error = math.sqrt(sum(item.error**2 * item.elements for item in found) / elements)
    logits = _of_logits(found)
    positions = sum(count for _, _, count in logits)
    if not positions:
        return Figures(error, elements)
    top1 = sum(top1 * count for top1, _, count in logits) / positions
    kl = sum(kl * count for _, kl, count in logits) / positions
    return Figures(error, elements, top1, kl, positions)


def worst(figures: Mapping[str, Figures]) -> Figures:
    """Returns the worst of each figure over the outputs of a graph.

    Args:
        figures: The figures by path of the output; at least one.
    """
    found = figures.values()
    error, elements = max(item.error for item in found), sum(item.elements for item in found)
    logits = _of_logits(found)
    if not logits:
        return Figures(error, elements)
    return Figures(
        error,
        elements,
        min(top1 for top1, _, _ in logits),
        max(kl for _, kl, _ in logits),
        sum(count for *_, count in logits),
    )


def _of_logits(found: Iterable[Figures]) -> list[tuple[float, float, int]]:
    return [(item.top1, item.kl, item.positions) for item in found if item.top1 is not None and item.kl is not None]


def over_budget(figures: Mapping[str, Figures], budget: Mapping[str, float], where: str) -> Iterator[str]:
    """Yields which figures are not within a budget, a text each.

    Args:
        figures: The figures by path of the output.
        budget: The least ``top1``, the largest ``kl`` and the largest ``error``.
        where: Which calls they are of.
    """
    found = worst(figures) if figures else None
    if found is None:
        return
    if found.top1 is not None and found.top1 < budget.get("top1", 0.0):
        yield f"top-1 agreement {found.top1:.4f} at {where} is less than {budget['top1']:g}"
    if found.kl is not None and found.kl > budget.get("kl", math.inf):
        yield f"KL divergence {found.kl:.2g} at {where} is more than {budget['kl']:g}"
    if found.error == math.inf:
        yield f"an output at {where} has a different shape, or infinities"
    elif found.error > budget.get("error", math.inf):
        yield f"error {found.error:.2g} at {where} is more than {budget['error']:g}"


def layer_table(quantised: Quantised) -> list[str]:
    """Returns the table of the layers of a quantised graph, a line each, if there was a budget; else their number."""
    lines = [quantised.text]
    if not quantised.budget or not quantised.layers:
        return lines
    header = ("layer", "weights", "stored in", quantised.harm_name)
    rows = [header] + [
        (layer.name, str(layer.elements), layer.stored, "" if layer.harm is None else f"{layer.harm:.2g}")
        for layer in quantised.layers
    ]
    return [*lines, *aligned(rows, ruled=True)]
