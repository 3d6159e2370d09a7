"""How much faster fused graphs of architectures run that no model builder knows; part of `make bench`.

Random models of ten architectures are exported twice: as the portable graph, and fused for onnxruntime. Both run the
same calls in one interleaved run: the first and the second of a generation, which decodes a token. The figure is the
fused graph's time as a fraction of the portable graph's; both include the overhead of calling an `OnnxModel`.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from figures import Figure, publish

import exportkit
from exportkit import OnnxModel

SIZES = {"vocab_size": 8000, "hidden_size": 512, "num_hidden_layers": 6, "max_position_embeddings": 4096}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1536}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
STATES = {"mamba_d_ssm": 512, "mamba_n_heads": 16, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_chunk_size": 32}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
T5 = {"vocab_size": 8000, "d_model": 512, "d_kv": 64, "d_ff": 1536, "num_layers": 6, "num_heads": 8}
WHISPER = {
    "vocab_size": 8000,
    "d_model": 512,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536,
    "num_mel_bins": 40,
    "max_source_positions": 300,
    "max_target_positions": 4096,
    "decoder_start_token_id": 1,
}
VISION = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 112,
    "patch_size": 14,
    "projection_dim": 256,
}
PLACES, IMAGE = (112 // 14) ** 2, 7999  # of an image in a prompt, and their token
LENGTHS = (512, 2048)  # of prompts, and so the number of tokens before the one that is decoded
SECONDS, LEAST, MOST = 3.0, 5, 41


def _text(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**IDS, **options))

    return make


def _llava() -> Any:
    text = transformers.LlamaConfig(**SIZES, **HEADS, **IDS)
    vision = transformers.CLIPVisionConfig(**VISION)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE, **IDS)
    return transformers.LlavaForConditionalGeneration(config)


MODELS: dict[str, Callable[[], Any]] = {
    "Falcon-H1": _text("FalconH1Config", **SIZES, **HEADS, **STATES),
    "Cohere2": _text("Cohere2Config", **SIZES, **HEADS, sliding_window=256),
    "GLM4": _text("Glm4Config", **SIZES, **HEADS, head_dim=64),
    "Mamba2": _text(
        "Mamba2Config",
        **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")},
        num_heads=32,
        head_dim=32,
        state_size=32,
        chunk_size=32,
        n_groups=1,
    ),
    "Mixtral": _text("MixtralConfig", **SIZES, **HEADS, **EXPERTS, sliding_window=None),
    "GPT-NeoX": _text("GPTNeoXConfig", **SIZES, num_attention_heads=8, intermediate_size=1536),
    "Starcoder2": _text("Starcoder2Config", **SIZES, **HEADS, sliding_window=None),
    "T5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(**T5, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2)
    ),
    "Whisper": lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER, **IDS)),
    "LLaVA": _llava,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    figures: list[Figure] = []
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            figures += measured(name, Path(folder))
    publish("architectures", "Fused graphs of ten architectures, wall time", ("fused", "portable"), figures)


def measured(name: str, folder: Path) -> Iterator[Figure]:
    """Yields the figures of a model."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    observer = exportkit.InputObserver()
    with observer(model, store_n_calls=8):
        for batch, length in ((2, 9), (3, 12)):
            _generate(model, batch, length, 3)
    exported = exportkit.export(model, observer)
    graphs = {
        "fused": exported.to_onnx(folder / "fused.onnx", runtime="onnxruntime"),
        "portable": exported.to_onnx(folder / "portable.onnx"),
    }
    for key, graph in graphs.items():
        report = graph.verify()
        if not report.ok:
            raise SystemExit(f"{name}, {key}: {report}")
    is_fused = "fused for onnxruntime: nothing" not in str(graphs["fused"].verify())
    for step, call in _calls(model).items():
        times = interleaved(graphs, call)
        print(f"{name}: {step}", {key: round(value, 2) for key, value in times.items()}, file=sys.stderr, flush=True)
        yield Figure(f"{name}: {step}", times, "ms", times["fused"] / times["portable"], 0.9 if is_fused else 1.05)


def _generate(model: Any, batch: int, length: int, tokens: int) -> None:
    """Generates after random prompts, spectrograms or prompts with an image."""
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    ids = torch.randint(3, 7000, (batch, length))
    kind = type(model).__name__
    if kind.startswith("Whisper"):
        given = {"input_features": torch.randn(batch, 40, 600), "decoder_input_ids": ids}
    elif kind.startswith("Llava"):
        ids = torch.cat([ids[:, :1], torch.full((batch, PLACES), IMAGE), ids], 1)
        given = {
            "input_ids": ids,
            "pixel_values": torch.randn(batch, 3, 112, 112),
            "attention_mask": torch.ones_like(ids),
        }
    else:
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        model.generate(**given, **options)


def _calls(model: Any) -> Mapping[str, Any]:
    """The first calls of generations, with their arguments as they were before."""
    found = {}
    for length in LENGTHS:
        observer = exportkit.InputObserver()
        with observer(model, store_n_calls=2):
            _generate(model, 1, length, 2)
        first, second = observer.observation.calls
        found |= {f"prefill {length}": first, f"decode, {length} cached": second}
    return found


def interleaved(graphs: Mapping[str, OnnxModel], call: Any) -> dict[str, float]:
    """Returns the median time of a call of each graph in milliseconds, in turn; each has its own arguments."""
    samples: dict[str, list[float]] = {name: [] for name in graphs}

    def once(name: str) -> float:
        args, kwargs = call.args_kwargs()
        started = time.perf_counter()
        graphs[name](*args, **kwargs)
        return time.perf_counter() - started

    longest = max(once(name) for name in graphs)
    for _ in range(max(LEAST, min(MOST, round(SECONDS / longest)))):
        for name in graphs:
            samples[name].append(1e3 * once(name))
    return {name: statistics.median(values) for name, values in samples.items()}


if __name__ == "__main__":
    main()
