"""Lets optimum's ORTModel classes run exported folders, and compares with what transformers returned.

In comes the directory that ``export_models.py`` wrote; out goes a line for each call, and an exit code. It runs in an
environment of its own, as optimum-onnx needs an older transformers than exportkit is tested with.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from optimum.onnxruntime import ORTModelForSeq2SeqLM, ORTModelForSequenceClassification

NEW_TOKENS = 15
SEARCHES: dict[str, dict[str, int]] = {"greedy": {}, "3 beams": {"num_beams": 3}}


def check_generator(folder: Path, cases: list[dict[str, Any]]) -> bool:
    model = ORTModelForSeq2SeqLM.from_pretrained(folder, use_io_binding=False)
    right = True
    for case in cases:
        inputs = _tensors(case["inputs"])
        for search, wanted in case["tokens"].items():
            tokens = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **SEARCHES[search]).tolist()
            different = len({token for row in wanted for token in row})
            verdict = "equal" if tokens == wanted else f"NOT EQUAL: {tokens} instead of {wanted}"
            print(
                f"{folder.name}, batch {len(wanted)}, {search}: {len(wanted[0])} tokens, {different} kinds, {verdict}"
            )
            right = right and tokens == wanted
    return right


def check_classifier(folder: Path, cases: list[dict[str, Any]]) -> bool:
    model = ORTModelForSequenceClassification.from_pretrained(folder, use_io_binding=False)
    right = True
    for case in cases:
        logits, wanted = model(**_tensors(case["inputs"])).logits, torch.tensor(case["logits"])
        far = (logits - wanted).abs().max().item()
        print(f"{folder.name}, batch {len(wanted)}: largest difference {far:.1e}")
        right = right and far < 1e-4
    return right


def _tensors(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in inputs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    expected = json.loads((directory / "expected.json").read_text("utf-8"))
    results = [
        (check_generator if "tokens" in cases[0] else check_classifier)(directory / name, cases)
        for name, cases in expected.items()
    ]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
