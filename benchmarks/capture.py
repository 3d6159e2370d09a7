"""The cost of capturing and swapping. Prints a table and writes ``results/capture.json``; part of `make bench`.

The model is a Llama with 12 layers of size 512, called with 128 tokens. All variants of a case compute the same
attention, in one interleaved run. Times are medians of CPU time on one thread. The allocator is set to keep freed
memory, as it does after a large tensor was freed; otherwise, the measurement would mostly show how the system provides
pages for values that are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from figures import Figure, publish
from measure import cpu_seconds, interleaved
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import monkey_patching as theirs
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from exportkit import apply_patches, capture, capture_outputs, clear_patch_mapping, register_patch_mapping

LAYERS, SIZE, TOKENS = 12, 512, 128
LARGE = 7 * 2**20  # numbers, in a tensor that lets glibc's malloc keep what is freed
SPECS = {"hidden_states": LlamaDecoderLayer, "attentions": "self_attn"}


class OtherMLP(LlamaMLP):
    """Computes the same as the original class."""


decorated = capture_outputs(LlamaForCausalLM.forward)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.zeros(LARGE)
    config = LlamaConfig(
        hidden_size=SIZE, intermediate_size=1408, num_hidden_layers=LAYERS, num_attention_heads=8, vocab_size=1000
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        figures = [captured(model), nothing_active(model), swapped(model), nothing_matched()]
    title = f"Capturing and patching: Llama, {LAYERS} layers of size {SIZE}, {TOKENS} tokens"
    publish("capture", title, ("bare", "exportkit", "transformers"), figures)


def captured(model: Any) -> Figure:
    ids = torch.randint(1000, (1, TOKENS))
    model.set_attn_implementation("eager")

    def call_captured() -> None:
        with capture(model, SPECS) as values:
            model(ids, use_cache=False)
        assert (len(values["hidden_states"]), len(values["attentions"])) == (LAYERS + 1, LAYERS)

    def call_theirs() -> None:
        result = model(ids, use_cache=False, output_hidden_states=True, output_attentions=True)
        assert (len(result.hidden_states), len(result.attentions)) == (LAYERS + 1, LAYERS)

    times = measured(
        {"bare": lambda: model(ids, use_cache=False), "exportkit": call_captured, "transformers": call_theirs}, 60
    )
    model.set_attn_implementation("sdpa")
    return ratio("hidden states and attentions captured, to a bare call", times, 1.03)


def nothing_active(model: Any) -> Figure:
    """Both forwards run on the same model; two models in different memory would differ by more."""
    ids = torch.randint(1000, (1, TOKENS))

    def call(forward: Callable[..., object]) -> Callable[[], object]:
        return lambda: forward(model, ids, use_cache=False)

    times = measured({"bare": call(LlamaForCausalLM.forward), "exportkit": call(decorated)}, 60)
    return ratio("a decorated forward that is asked for nothing, to a bare call", times, 1.0)


def swapped(model: Any) -> Figure:
    register_patch_mapping({"LlamaMLP": OtherMLP})

    def swap() -> None:
        with apply_patches(model) as applied:
            assert len(applied) == LAYERS

    times = measured({"exportkit": swap}, 100)
    clear_patch_mapping()
    return Figure(f"{LAYERS} live modules swapped and put back", times, "ms", times["exportkit"], 1.0)


def nothing_matched() -> Figure:
    """Both search all loaded modules for a class that does not exist."""
    mapping: dict[Any, type[torch.nn.Module]] = {"NoSuchClass": OtherMLP}
    register_patch_mapping(mapping)
    theirs.register_patch_mapping(mapping)

    def enter(context: Callable[[], Any]) -> Callable[[], None]:
        def step() -> None:
            with context():
                pass

        return step

    times = measured({"exportkit": enter(apply_patches), "transformers": enter(theirs.apply_patches)}, 5)
    clear_patch_mapping()
    theirs.clear_patch_mapping()
    ratio = times["exportkit"] / times["transformers"]
    return Figure("a context without a model that matches nothing, to transformers", times, "ms", ratio, 1.0)


def measured(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Returns the median CPU milliseconds of each step."""
    blocks = {name: lambda step=step: cpu_seconds(step, 1) for name, step in steps.items()}
    return {name: timing.median / 1000 for name, timing in interleaved(blocks, rounds, warm_up=2).items()}


def ratio(case: str, times: dict[str, float], target: float) -> Figure:
    return Figure(case, times, "ms", times["exportkit"] / times["bare"], target, noise=0.01)


if __name__ == "__main__":
    main()
