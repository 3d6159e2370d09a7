"""The three models of ``exportkit demo``: a decoder that generates, an encoder, and a module with nested inputs.

The models are tiny and their weights are random, so nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from exportkit.examples.run import ExampleRun, padded, random_tokens

_SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def demo_runs() -> list[ExampleRun]:
    """Returns the examples: a Llama, a Bert, and a plain module."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [_llama(), _bert(), _ranker()]


def _llama() -> ExampleRun:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_SIZES, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = LlamaForCausalLM(config).eval()
    # generate() drops a mask of ones, so the prompt starts with a padding token: the graph then has a mask too.
    prompt, mask = random_tokens(model, 1, 7), torch.ones(1, 7, dtype=torch.int64)
    prompt[:, 0] = mask[:, 0] = 0

    def run() -> None:
        model.generate(input_ids=prompt, attention_mask=mask, min_new_tokens=4, max_new_tokens=4, do_sample=False)

    return ExampleRun("tiny Llama", "generate: one prompt of 7 tokens, 4 new tokens", model, run)


def _bert() -> ExampleRun:
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(**_SIZES)).eval()
    batches = [padded(model, *shape) for shape in ((2, 7), (3, 9), (1, 5))]

    def run() -> None:
        for batch in batches:
            model(**batch)

    return ExampleRun("tiny Bert", "3 padded batches of 2, 3 and 1 sentences", model, run)


class Ranker(torch.nn.Module):
    """Scores the items of a shop for visitors, from nested inputs as a data loader returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.visitor = torch.nn.Linear(6 + 3, 8)
        self.clicked = torch.nn.Linear(4, 8)
        self.bought = torch.nn.Linear(5, 8)
        self.items = torch.nn.Linear(8, 10)

    def forward(
        self, visitor: Mapping[str, Any], history: Sequence[torch.Tensor], boost: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Returns scores for 10 items and the best of them.

        Args:
            visitor: ``{"age": (batch, 6), "place": {"region": (batch, 3)}}``.
            history: What each visitor clicked on, and what they bought: ``(batch, clicks, 4)``, ``(batch, buys, 5)``.
            boost: Added to the scores, ``(batch, 10)``.
        """
        clicks, buys = history
        state = self.visitor(torch.cat([visitor["age"], visitor["place"]["region"]], dim=1))
        state = state + self.clicked(clicks).relu().sum(1) + self.bought(buys).relu().sum(1)
        scores = self.items(state)
        if boost is not None:
            scores = scores + boost
        return {"scores": scores, "best": scores.argmax(1)}


def _ranker() -> ExampleRun:
    model = Ranker().eval()
    visits = [_visit(2, 4, 3), _visit(3, 6, 5), _visit(1, 3, 7)]
    boosts = [{}, {"boost": torch.randn(3, 10)}, {"boost": torch.randn(1, 10)}]

    def run() -> None:
        for visit, boost in zip(visits, boosts, strict=True):
            model(*visit, **boost)

    return ExampleRun("nested inputs", "3 calls: a dict in a dict, a list, a tensor that one call lacks", model, run)


def _visit(batch: int, clicks: int, buys: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    visitor = {"age": torch.randn(batch, 6), "place": {"region": torch.randn(batch, 3)}}
    return visitor, [torch.randn(batch, clicks, 4), torch.randn(batch, buys, 5)]
