"""Exports tiny models to folders, with what transformers makes of some inputs, for clients in another environment.

Writes a folder for each model and ``expected.json`` for optimum, and programs (``.pt2``) with their calls (``.pt``) for
the compilers. Run by ``make clients``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import exportkit

VOCABULARY, NEW_TOKENS = 100, 15
SEARCHES: dict[str, dict[str, int]] = {"greedy": {}, "3 beams": {"num_beams": 3}}


def t5() -> torch.nn.Module:
    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def bart() -> torch.nn.Module:
    config = BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, pad_token_id=1,
        bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    return BartForConditionalGeneration(config)


def bert() -> torch.nn.Module:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    return BertForSequenceClassification(config)


def llama() -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def lively(model: torch.nn.Module) -> torch.nn.Module:
    """The model with weights large enough that its tokens depend on its input."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def prompt(batch: int, length: int, padding: int) -> dict[str, torch.Tensor]:
    """Token ids and their mask; the first of several rows is shorter than the others."""
    ids = torch.randint(3, VOCABULARY - 1, (batch, length))
    mask = torch.ones_like(ids)
    if batch > 1:
        ids[0, -2:], mask[0, -2:] = padding, 0
    return {"input_ids": ids, "attention_mask": mask}


def save_generator(model: torch.nn.Module, folder: Path) -> list[dict[str, Any]]:
    """Exports an encoder-decoder model from one ``generate``, and returns inputs with the tokens that follow."""
    padding = model.config.pad_token_id
    observer = exportkit.InputObserver()
    with observer(model, parts="auto"):
        model.generate(**prompt(2, 7, padding), max_new_tokens=4, do_sample=False)
    exportkit.export(model, observer).save(folder)
    cases = []
    for batch, length in ((1, 5), (1, 9), (1, 12), (3, 9), (3, 6)):
        inputs = prompt(batch, length, padding)
        tokens = {
            search: model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **options).tolist()
            for search, options in SEARCHES.items()
        }
        cases.append({"inputs": _lists(inputs), "tokens": tokens})
    return cases


def save_classifier(model: torch.nn.Module, folder: Path) -> list[dict[str, Any]]:
    """Exports an encoder from two calls, and returns inputs with its logits."""
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, length in ((2, 7), (3, 5)):
            model(**prompt(batch, length, 0))
    exportkit.export(model, observer).save(folder)
    with torch.no_grad():
        calls = [prompt(batch, 9, 0) for batch in (1, 3)]
        return [{"inputs": _lists(inputs), "logits": model(**inputs).logits.tolist()} for inputs in calls]


def save_decoder_program(model: torch.nn.Module, path: Path) -> None:
    """Saves the program of a decoder with a cache, with prompts, single tokens, and several tokens on a past.

    ExecuTorch reserves memory for the upper limit of each size, so the plan states them.
    """
    observer = exportkit.InputObserver()
    with observer(model):
        model.generate(prompt(1, 5, 0)["input_ids"], max_new_tokens=4, do_sample=False)
    plan = observer.plan().range("batch", 1, 8).range("sequence", 1, 64).range("past_sequence", 0, 128)
    exported = exportkit.export(model, plan)
    exported.save_program(path)

    def caches(cache: DynamicCache) -> dict[str, torch.Tensor]:
        return {
            f"past_key_values.layers[{number}].{name}": getattr(layer, name).clone()
            for number, layer in enumerate(cache.layers)
            for name in ("keys", "values")
        }

    calls = []
    for batch, past, new in ((1, 7, 1), (3, 9, 5), (2, 60, 4), (8, 128, 64)):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt(batch, past, 0)["input_ids"], past_key_values=cache)
            given: dict[str, torch.Tensor] = {
                "input_ids": prompt(batch, new, 0)["input_ids"],
                "attention_mask": torch.ones(batch, past + new, dtype=torch.int64),
                "position_ids": torch.arange(past, past + new).repeat(batch, 1),
                **caches(cache),
            }
            plain = {name: given[name] for name in ("input_ids", "attention_mask", "position_ids")}
            result = model(**plain, past_key_values=cache, logits_to_keep=1)
        returned = {"logits": result.logits, **caches(cache)}
        calls.append(([given[name] for name in exported.inputs], [returned[name] for name in exported.outputs]))
    torch.save(calls, path.with_suffix(".pt"))


def save_image_program(path: Path) -> None:
    """Saves the program of a small image model, with images of several sizes."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.AvgPool2d(2)).eval()
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for shape in ((2, 3, 8, 10), (3, 3, 12, 6)):
            model(torch.randn(shape))
    plan = observer.plan().range("batch", 1, 8).range("height", 4, 64).range("width", 4, 64)
    exportkit.export(model, plan).save_program(path)
    with torch.no_grad():
        images = [torch.randn(shape) for shape in ((5, 3, 16, 4), (1, 3, 64, 64), (4, 3, 6, 20))]
        torch.save([([image], [model(image)]) for image in images], path.with_suffix(".pt"))


def _lists(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in inputs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    torch.manual_seed(0)
    generators = {"t5": t5, "bart": bart}
    expected = {name: save_generator(lively(make()), directory / name) for name, make in generators.items()}
    expected["bert"] = save_classifier(lively(bert()), directory / "bert")
    (directory / "expected.json").write_text(json.dumps(expected), "utf-8")
    save_decoder_program(lively(llama()), directory / "decoder.pt2")
    save_image_program(directory / "images.pt2")
    print(f"exported {', '.join(expected)}, and the programs of a decoder and an image model")


if __name__ == "__main__":
    main()
