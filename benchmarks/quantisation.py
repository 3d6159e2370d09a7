"""What weights in fewer bits cost in accuracy, and what a budget buys; part of `make bench`.

Random weights say nothing about accuracy, so a model is trained first, for about a minute: a transformer of two layers,
on a language in which two symbols decide which four may follow, and how often. Texts that were not recorded judge it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from figures import Figure, publish
from transformers import LlamaConfig, LlamaForCausalLM

import exportkit
from exportkit import OnnxModel, Quantisation
from exportkit.proof.figures import Figures, figures_of

SYMBOLS, STEPS, ROWS, LENGTH = 64, 600, 32, 64
SHARES = (0.6, 0.25, 0.1, 0.05)  # how often each of the four successors follows
BUDGET = 0.5  # of the KL divergence that int4 has without a budget


class Language:
    """Texts in which two symbols decide what may follow them."""

    def __init__(self) -> None:
        self._successors = torch.randint(SYMBOLS, (SYMBOLS, SYMBOLS, len(SHARES)))

    def texts(self, rows: int, length: int) -> torch.Tensor:
        """Returns random texts."""
        text = list(torch.randint(SYMBOLS, (2, rows)))
        choices = torch.multinomial(torch.tensor([SHARES] * rows), length, replacement=True)
        for place in range(length - 2):
            text.append(self._successors[text[-2], text[-1]].gather(1, choices[:, place : place + 1])[:, 0])
        return torch.stack(text, 1)


def main() -> None:
    torch.manual_seed(0)
    language = Language()
    model = _trained(language)
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for rows, length in ((4, 50), (16, 60)):
            model(input_ids=language.texts(rows, length), use_cache=False)
    exported = exportkit.export(model, observer)
    test = language.texts(64, 60)
    with torch.no_grad():
        expected = model(input_ids=test, use_cache=False).logits

    def judged(onnx_model: OnnxModel) -> tuple[float, Figures]:
        size = onnx_model.path.with_name(onnx_model.path.name + ".data").stat().st_size
        return size / 1e3, figures_of(expected, onnx_model(input_ids=test, use_cache=False).logits, None, True)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        found = {"float32": judged(exported.to_onnx(path))}
        found["int8"] = judged(exported.to_onnx(path, weights="int8"))
        plain = exported.to_onnx(path, weights="int4")
        found["int4"] = judged(plain)
        budget = BUDGET * min(figures["logits"].kl or 0.0 for figures in plain.verify().figures.values())
        found["int4, 16"] = judged(exported.to_onnx(path, weights=Quantisation("int4", block_size=16)))
        kept = exported.to_onnx(path, weights="int4", accuracy={"kl": budget})
        found["budget"] = judged(kept)
        report = kept.verify()
    print(report)
    sizes = {name: size for name, (size, _) in found.items()}
    kl = {name: figures.kl or 0.0 for name, (_, figures) in found.items()}
    wrong = {name: 1 - (figures.top1 or 0.0) for name, (_, figures) in found.items()}
    worst = max(figures["logits"].kl or 0.0 for figures in report.figures.values())
    publish(
        "quantisation",
        f"A trained model of 2 layers; int4 keeps a KL divergence of {budget:.2g}",
        tuple(found),
        [
            Figure("weights, budget : int8", sizes, "kB", sizes["budget"] / sizes["int8"], 1.0),
            Figure("weights, budget : int4 in blocks of 16", sizes, "kB", sizes["budget"] / sizes["int4, 16"], 1.0),
            Figure("KL divergence, budget : int4 in blocks of 16", kl, "nats", kl["budget"] / kl["int4, 16"], 1.0),
            Figure("other top-1 choices, budget : int4", wrong, "share", wrong["budget"] / wrong["int4"], 1.0),
            Figure("KL divergence in the report : its budget", {"budget": worst}, "nats", worst / budget, 1.0),
        ],
    )


def _trained(language: Language) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        vocab_size=SYMBOLS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), 4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, STEPS)
    for _ in range(STEPS):
        texts = language.texts(ROWS, LENGTH)
        optimiser.zero_grad()
        model(input_ids=texts, labels=texts).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return model.eval()


if __name__ == "__main__":
    main()
