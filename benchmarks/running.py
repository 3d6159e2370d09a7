"""How fast exported decoders run. Prints a table and writes ``results/running.json``; part of `make bench`.

Random models of about 100 M parameters are exported by exportkit (for onnxruntime, and as the portable graph), by the
model builder of onnxruntime-genai and by ``transformers.exporters`` with its fusions. All graphs return the logits of
all tokens, and run in plain onnxruntime sessions with the same inputs. Each row is one interleaved run; its figure is
exportkit's time divided by the fastest peer's. Every float32 graph must first generate the same tokens as the model.

With ``--device cuda``, models and graphs are in float16 on the GPU, inputs and outputs stay there, and the results are
in ``results/running_cuda.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from figures import Figure, publish

import exportkit

SIZES = {"hidden_size": 640, "num_attention_heads": 10, "num_key_value_heads": 2, "intermediate_size": 2048}
COMMON = {
    "vocab_size": 32000,
    "max_position_embeddings": 16384,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS = {
    "Qwen3": ("Qwen3Config", {"head_dim": 64, "num_hidden_layers": 12}),
    "Llama": ("LlamaConfig", {"num_hidden_layers": 12}),
    "Gemma3": ("Gemma3TextConfig", {"head_dim": 64, "num_hidden_layers": 12, "sliding_window": 512}),
    "Phi3": (
        "Phi3Config",
        {"num_hidden_layers": 12, "sliding_window": None, "original_max_position_embeddings": 16384},
    ),
}
PEERS = ("builder", "transformers")
COLUMNS = ("exportkit", "portable", *PEERS, "eager", "exportkit int4", "builder int4")
DTYPES = {"cpu": torch.float32, "cuda": torch.float16}  # by device
SECONDS, LEAST, MOST = 2.0, 3, 25  # for each graph in a row, and how often it runs
PROMPT, TOKENS = 16, 8


@dataclass(frozen=True)
class Row:
    """One step: new tokens after cached ones."""

    batch: int
    new: int
    past: int

    def __str__(self) -> str:
        what = f"decode, {self.past} cached" if self.past else f"prefill {self.new}"
        return f"{what}, batch {self.batch}"


ROWS = [
    Row(batch, *step) for batch in (1, 4) for step in ((32, 0), (256, 0), (1024, 0), (1, 512), (1, 2048), (1, 8192))
]


@dataclass(frozen=True)
class Tool:
    """Graphs that one tool made.

    Attributes:
        prefill: The graph for the first tokens.
        decode: The graph for one token more; the same one if a tool writes one graph.
        shortens: Whether layers with a sliding window keep no more than it.
    """

    prefill: Path
    decode: Path
    shortens: bool = True


class Runner:
    """Runs the graphs of a tool in plain sessions.

    Args:
        tool: The tool.
        windows: The window of each layer; None where it has none.
        threads: How many threads each session uses.
        device: Where the model is, and the graphs run.
    """

    def __init__(self, tool: Tool, windows: Sequence[int | None], threads: int, device: str = "cpu") -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        paths = dict.fromkeys((tool.prefill, tool.decode))
        providers = [*["CUDAExecutionProvider"][: device == "cuda"], "CPUExecutionProvider"]
        self._sessions = {path: onnxruntime.InferenceSession(path, options, providers=providers) for path in paths}
        self._tool, self._windows, self._value = tool, windows, onnxruntime.OrtValue.ortvalue_from_numpy
        self._device, self._dtype = device, DTYPES[device]

    def step(self, row: Row, heads: int, width: int) -> Callable[[], object]:
        """Returns what runs one step, with random tokens and a random cache."""
        session = self._session(row.past)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, 999, (row.batch, row.new), generator=generator)
        cache = {
            key: torch.randn(row.batch, heads, self._kept(key[0], row.past), width, generator=generator).to(self._dtype)
            for key in _places(session.get_inputs())
        }
        feeds = self._feeds(session, ids, row.past, cache)
        names = [output.name for output in session.get_outputs()]
        return lambda: self._run(session, names, feeds)

    def _run(self, session: Any, names: Sequence[str], feeds: Mapping[str, Any]) -> Sequence[Any]:
        if self._device == "cpu":
            return session.run_with_ort_values(names, feeds)
        binding = session.io_binding()
        for name, value in feeds.items():
            binding.bind_ortvalue_input(name, value)
        for name in names:
            binding.bind_output(name, self._device)
        session.run_with_iobinding(binding)
        return binding.get_outputs()

    def generate(self, ids: torch.Tensor, heads: int, width: int, tokens: int) -> torch.Tensor:
        """Returns the most likely tokens after a prompt, one after the other."""
        past, new, found = 0, ids, []
        cache: Mapping[tuple[int, str], torch.Tensor] = {}
        for _ in range(tokens):
            session = self._session(past)
            empty = torch.zeros(ids.shape[0], heads, 0, width, dtype=self._dtype)
            feeds = self._feeds(
                session, new, past, {key: cache.get(key, empty) for key in _places(session.get_inputs())}
            )
            names = [output.name for output in session.get_outputs()]
            returned = self._run(session, names, feeds)
            outputs = {name: torch.from_numpy(value.numpy()) for name, value in zip(names, returned, strict=True)}
            places = _places(session.get_outputs())
            cache, past = {key: outputs[name] for key, name in places.items()}, past + new.shape[1]
            new = outputs["logits"][:, -1:].argmax(-1)
            found.append(new)
        return torch.cat(found, 1)

    def logits(self, ids: torch.Tensor, heads: int, width: int) -> torch.Tensor:
        """Returns the logits of a prompt."""
        session = self._session(0)
        empty = torch.zeros(ids.shape[0], heads, 0, width, dtype=self._dtype)
        feeds = self._feeds(session, ids, 0, dict.fromkeys(_places(session.get_inputs()), empty))
        (found,) = self._run(session, ["logits"], feeds)
        return torch.from_numpy(found.numpy())

    def _session(self, past: int) -> Any:
        return self._sessions[self._tool.decode if past else self._tool.prefill]

    def _kept(self, layer: int, past: int) -> int:
        window = self._windows[layer]
        return past if window is None or not self._tool.shortens else min(past, window - 1)

    def _feeds(
        self, session: Any, ids: torch.Tensor, past: int, cache: Mapping[tuple[int, str], torch.Tensor]
    ) -> dict[str, Any]:
        batch, new = ids.shape
        known = {
            "input_ids": ids,
            "attention_mask": torch.ones(batch, past + new, dtype=torch.int64),
            "position_ids": torch.arange(past, past + new).expand(batch, new),
        }
        places = {name: key for key, name in _places(session.get_inputs()).items()}
        known |= {  # transformers.exporters asks for the window of each layer
            item.name: torch.tensor(self._windows[int(item.name.split(".")[-2])])
            for item in session.get_inputs()
            if item.name.endswith("._sliding_window_tensor")
        }
        given = {
            item.name: cache[places[item.name]] if item.name in places else known[item.name]
            for item in session.get_inputs()
        }
        return {name: self._value(tensor.contiguous().numpy(), self._device) for name, tensor in given.items()}


def _places(values: Sequence[Any]) -> dict[tuple[int, str], str]:
    """The names of the tensors of a cache, by layer and kind."""
    found = {}
    for value in values:
        match = re.search(r"\.(\d+)\.(key|value)s?$", value.name)
        if match:
            found[int(match[1]), match[2]] = value.name
    return found


class Eager:
    """The model itself."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def step(self, row: Row, heads: int, width: int) -> Callable[[], object]:
        """Returns what runs one step, with random tokens and a random cache."""
        from transformers import DynamicCache

        cache, device = DynamicCache(config=self._model.config), self._model.device
        for layer in range(self._model.config.num_hidden_layers if row.past else 0):
            states = torch.randn(2, row.batch, heads, row.past, width, dtype=self._model.dtype, device=device)
            cache.update(*states, layer)
        ids = torch.randint(3, 999, (row.batch, row.new), device=device)
        mask = torch.ones(row.batch, row.past + row.new, dtype=torch.int64, device=device)

        def run() -> object:
            with torch.no_grad():
                result = self._model(input_ids=ids, attention_mask=mask, past_key_values=cache if row.past else None)
            if row.past and not any(cache.is_sliding):  # as it was; windows keep their length anyway
                cache.crop(-row.new)
            if device.type == "cuda":
                torch.cuda.synchronize()
            return result

        return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rows", default="", help="regular expression, searched in the names of the rows")
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--device", default="cpu", choices=DTYPES)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = [row for row in ROWS if re.search(options.rows, str(row))]
    figures: list[Figure] = []
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            figures += measured(name, Path(folder), rows, options.threads, options.device)
    title = "Decoders of about 100 M parameters in onnxruntime, wall time"
    if options.device == "cuda":
        title += f", float16 on {torch.cuda.get_device_name()}"
    publish("running" if options.device == "cpu" else "running_cuda", title, COLUMNS, figures, 180)


def measured(
    name: str, folder: Path, rows: Sequence[Row], threads: Sequence[int], device: str = "cpu"
) -> Iterator[Figure]:
    """Yields the figures of a model."""
    model = model_of(name).to(device, DTYPES[device])
    tools = dict(exports(model, folder))
    config = model.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    heads, width = (
        config.num_key_value_heads,
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )
    runners = {key: Runner(tool, windows, 2, device) for key, tool in tools.items()}
    yield from agreement(name, model, runners, heads, width)
    for count in threads:
        torch.set_num_threads(count)
        timed: dict[str, Any] = {key: Runner(tool, windows, count, device) for key, tool in tools.items()}
        timed["eager"] = Eager(model)
        for row in rows:
            times = interleaved({key: runner.step(row, heads, width) for key, runner in timed.items()})
            label = f"{name}: {row}, {count} thread{'s' if count > 1 else ''}"
            fastest = min(times[peer] for peer in PEERS if peer in times)
            yield Figure(label, times, "ms", times["exportkit"] / fastest, 1.05)
            if "builder int4" in times:
                quotient = times["exportkit int4"] / times["builder int4"]
                yield Figure(f"{label}, int4", times, "ms", quotient, 1.05 if row.past else float("inf"))
            print(label, {key: round(value, 2) for key, value in times.items()}, file=sys.stderr, flush=True)


def agreement(name: str, model: Any, runners: Mapping[str, Runner], heads: int, width: int) -> Iterator[Figure]:
    """Checks the tokens of float32 graphs, and yields how far those in lower precision are from the model."""
    ids = torch.randint(3, 999, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    given = ids.to(model.device)
    with torch.no_grad():
        expected = model.generate(input_ids=given, attention_mask=torch.ones_like(given), **options)[:, PROMPT:].cpu()
        logits = model(input_ids=given).logits.cpu().float()
    plain = ("exportkit", "portable", *PEERS)
    for key in plain if model.dtype is torch.float32 else ():
        found = runners[key].generate(ids, heads, width, TOKENS) if key in runners else expected
        if not torch.equal(found, expected):
            raise SystemExit(f"{name}: {key} generates {found.tolist()} instead of {expected.tolist()}")
    apart = {}
    for key in (key for key in runners if "int4" in key or model.dtype is not torch.float32):
        difference = runners[key].logits(ids, heads, width).float() - logits
        apart[key] = (difference.square().mean().sqrt() / logits.std()).item()
    if {"exportkit int4", "builder int4"} <= apart.keys():
        yield Figure(
            f"{name}: error, to the spread of the logits; figure of int4",
            apart,
            "-",
            apart["exportkit int4"] / apart["builder int4"],
            1.0,
        )


def model_of(name: str) -> Any:
    """Returns a random model."""
    import transformers

    kind, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SIZES, **COMMON, **options)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def exports(model: Any, folder: Path) -> Iterator[tuple[str, Tool]]:
    """Yields the graphs of each tool."""
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, length in ((2, 7), (3, 9)):
            ids = torch.randint(3, 999, (batch, length), device=model.device)
            past = model(input_ids=ids, attention_mask=torch.ones_like(ids)).past_key_values
            mask = torch.ones(batch, length + 1, dtype=torch.int64, device=model.device)
            model(input_ids=ids[:, :1], attention_mask=mask, past_key_values=past)
    exported = exportkit.export(model, observer)
    for name, options in {
        "portable": {},
        "exportkit": {"runtime": "onnxruntime"},
        "exportkit int4": {"runtime": "onnxruntime", "weights": "int4"},
    }.items():
        path = folder / name / "model.onnx"
        path.parent.mkdir()
        onnx_model = exported.to_onnx(path, **options)
        report = onnx_model.to(model.device).verify()
        if "int4" not in name and not report.ok:
            raise SystemExit(f"{name}: {report}")
        print(*report.findings, sep="\n", file=sys.stderr)
        yield name, Tool(path, path)
    model.save_pretrained(folder / "checkpoint")
    _save_tokenizer(folder / "checkpoint")
    usual = "fp32" if model.dtype is torch.float32 else "fp16"
    for name, precision in (("builder", usual), ("builder int4", "int4")):
        path = folder / name
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(folder / "checkpoint")]
        command += ["-o", str(path), "-p", precision, "-e", model.device.type]
        built = subprocess.run(command, check=False, capture_output=True, text=True)
        if built.returncode:  # seen with Gemma3 of transformers 5.23: it expects rope_parameters of older versions
            print(f"{name} failed: {built.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            continue
        yield name, Tool(path / "model.onnx", path / "model.onnx", shortens=False)
    with contextlib.redirect_stdout(io.StringIO()):
        yield "transformers", _by_transformers(model, folder / "transformers")


def _save_tokenizer(folder: Path) -> None:
    """Saves a tokenizer of one word, as the builder wants to load one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({"word": 0}, unk_token="word"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def _by_transformers(model: Any, folder: Path) -> Tool:
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter
    from transformers.exporters.utils import decompose_prefill_decode

    ids = torch.randint(3, 99, (2, 7), device=model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name, (part, example) in decompose_prefill_decode(model, inputs).items():
        config = OnnxConfig(dynamic=True, ort_fusions=model.device.type)
        made = OnnxExporter().export(part, example, config=config)
        made.save_pretrained(folder / name)
    return Tool(folder / "prefill" / "model.onnx", folder / "decode" / "model.onnx")


def interleaved(steps: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the median time of each step in milliseconds, of runs in turn."""
    longest = 0.0
    for step in steps.values():  # warms up
        started = time.perf_counter()
        step()
        longest = max(longest, time.perf_counter() - started)
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(max(LEAST, min(MOST, round(SECONDS / longest)))):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            samples[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in samples.items()}


if __name__ == "__main__":
    main()
