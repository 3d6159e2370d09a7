"""Random small models: statements over tensors, sizes, conditions, loops, optional inputs, numbers and values.

A model is drawn from a grammar by its seed, together with two or three calls to record; seeds that are a multiple of
five make models of one statement. Whether it can be exported is open; if it is, no other call may be answered wrongly.
``python -m tests.trust --generated 0:100`` judges a hundred of them, and prints each with ``--verbose``.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import random
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.trust.cases import Call, Case

_BEGIN = "<new states> = <states>\nlast = <same states>\nfilled = torch.zeros_like(x)\n"
_END = "\n<new rows> = filled + last[:, None]"
_LOOPS = [
    f"{_BEGIN}{head}\n    {body}{_END}"
    for head in (
        "for i, row in enumerate(x.unbind(1)):",
        "for i, row in enumerate(x.transpose(0, 1)):",
        "for i in range(n):\n    row = x[:, i]",
        "for i in range(1, n):\n    row = x[:, i]",
    )
    for body in (
        "if <decision>:\n        <change>",
        "if <decision>:\n        <change>\n    else:\n        <change>\n        <change>",
        "if <decision>:\n        continue\n    <change>\n    <change>",
        "<change>\n    if <decision>:\n        break\n    <change>",
        "if <decision>:\n        <change>\n        break\n    <change>",
        "<change>\n    if <decision>:\n        <change>\n    elif <decision>:\n        <change>",
    )
]

# An expression of each kind: "rows" is a tensor of shape (batch, length, 4), "flat" (batch, length), "states"
# (batch, 4), "whole" an integer (batch, length), "number" a Python integer that is at least 0. <kind> stands for
# another expression, <kind a> for a variable that is the same wherever it occurs in the text.
GRAMMAR: dict[str, list[str]] = {
    "rows": [
        "<rows a>.relu() - 0.3 * <rows a>",
        "F.softsign(<rows>)",
        "<rows a> * <rows a>.mean(1, keepdim=True)",
        "<rows a> + <states>[:, None]",
        "<rows a> * <rows a>.flip(1)",
        "<rows a>[:, :<number>]",
        "<rows a>[:, <number>:]",
        "<rows a>[:, -<number>:]",
        "<rows a>[:, :-<small>]",
        "<rows a>[:, ::<small>]",
        "<rows a>[:, <number> : <number>]",
        "torch.cat([<rows>, <rows>], 1)",
        "torch.cat([<states>[:, None], <rows>], dim=1)",
        "F.pad(<rows a>, (0, 0, 0, <number>))",
        "F.pad(<rows a>, (0, 0, 0, (<small> - <rows a>.shape[1]) % <small>))",
        "<rows>.roll(<number>, 1)",
        "<rows>.repeat_interleave(<small>, dim=1)",
        "<rows a>.repeat(1, <small>, 1)",
        "<rows a>.cumsum(1)",
        "<rows a>.softmax(1)",
        "<rows a>.sort(1).values",
        "<rows a>.topk(min(<small>, <rows a>.shape[1]), dim=1).values",
        "self.linear(<rows>)",
        "self.norm(<rows>)",
        "self.inner(<rows>)",
        "self.conv(<rows>.transpose(1, 2)).transpose(1, 2)",
        "self.rnn(<rows>)[0]",
        "self.table[: <rows a>.shape[1]] + <rows a>",
        "self.embed(torch.arange(<rows a>.size(1)).clamp(max=15)) + <rows a>",
        "F.scaled_dot_product_attention(<rows>, <rows a>, <rows a>)",
        "F.scaled_dot_product_attention(<rows a>, <rows a>, <rows a>, is_causal=<rows a>.shape[1] > <small>)",
        "torch.baddbmm(<rows a>, <rows a> @ <rows a>.transpose(1, 2), <rows a>, alpha=0.1)",
        "<rows a>.masked_fill(<rows a> < 0, <real>)",
        "torch.where(<rows a> > <states>[:, None], <rows a>, <real>)",
        "<rows a> * <real>",
        "<rows a> + <number>",
        "<flat>[..., None] * self.weight",
        "self.embed(<whole>)",
        "<rows a>.gather(1, <rows a>.argmax(1, keepdim=True).expand(-1, <small>, -1))",
        "<rows a>.index_select(1, torch.arange(0, <rows a>.shape[1], <small>))",
        "F.interpolate(<rows a>.transpose(1, 2), size=<size>, mode='nearest').transpose(1, 2)",
        "F.adaptive_avg_pool1d(<rows a>.transpose(1, 2), <small>).transpose(1, 2)",
        "F.avg_pool1d(<rows a>.transpose(1, 2), <small>, ceil_mode=True).transpose(1, 2)",
        "<rows a>.unfold(1, <small>, <small>).mean(-1)",
        "<rows a>.reshape(<rows a>.shape[0], -1, 2, 4).mean(2)",
        "<rows a>.view(len(<rows a>), -1, <small>, 4)[:, :, 0]",
        "<rows a>.new_zeros(<rows a>.shape[0], <size>, 4) + <rows a>.mean(1, keepdim=True)",
        "torch.zeros_like(<rows a>).index_fill(1, torch.tensor([0]), <real>) + <rows a>",
        "<rows a>.chunk(2, dim=1)[0]",
        "torch.stack(<rows>.unbind(1)[::2], dim=1)",
        "torch.stack([row * i for i, row in enumerate(<rows>.unbind(1))], 1)",
        "torch.stack([<rows a>[:, i] * (i + 1) for i in range(<rows a>.shape[1])], 1)",
        "torch.cat([part.cumsum(1) for part in <rows>.split(<small>, 1)], 1)",
        "torch.einsum('bnh,bmh->bnm', <rows a>, <rows b>).softmax(-1) @ <rows b>",
        "(<rows a> if <condition> else <rows b>)",
        "(<rows a> * 2 if <condition> else <rows a>)",
        "<rows a> / max(<number>, 1)",
        "<rows a> * {3: 0.5, 5: 2.0, 6: 3.0}.get(<number>, 1.0)",
        "<rows a> * [0.5, 1.0, 2.0][min(<number>, 2)]",
        "<rows a>.tril(<number>)",
        "<rows a>.narrow(1, 0, min(<size>, <rows a>.shape[1]))",
        "<rows a>.double().mean((1, 2), keepdim=True).float() - <rows a>",
        "pooled(<rows>, <small>)",
        "scaled(<rows a>)",
        "joined(<rows a>, <rows b>)",
    ],
    "flat": [
        "<rows>.sum(-1)",
        "<rows>[..., <digit>]",
        "<rows>.norm(dim=-1)",
        "<flat>.cumsum(-1)",
        "<flat>.softmax(-1)",
        "<rows>.amax(-1)",
        "(<whole a> > <small>).float()",
        "torch.arange(<flat a>.shape[1]) + <flat a>",
        "<flat a>[:, <number>:]",
        "<rows>.flatten(1)",
        "<rows a>.view(<rows a>.shape[0], -1)",
        "torch.bmm(<rows a>, <rows a>.mean(1)[..., None]).squeeze(-1)",
        "<flat a> / <flat a>.shape[1] ** 0.5",
        "torch.linspace(0, 1, <size>).expand(len(<rows a>), -1)",
        "<rows a>.mean(1, keepdim=True).squeeze(1)",
    ],
    "states": [
        "<rows>.mean(1)",
        "<rows>.sum(1)",
        "<rows>.amax(dim=1)",
        "<rows>[:, 0]",
        "<rows>[:, -1]",
        "<rows a>[:, <rows a>.shape[1] // 2]",
        "<rows a>[:, -min(<rows a>.shape[1], <small>)]",
        "<rows>.std(1, unbiased=False)",
        "torch.tanh(<states>)",
        "self.linear(<states>)",
        "self.rnn(<rows>)[1][0]",
        "<rows a>[torch.arange(len(<rows a>)), <rows a>.sum(-1).argmax(1)]",
        "functools.reduce(torch.add, <rows>.unbind(1))",
        "sum(<rows>.unbind(1)) / <real>",
        "(<rows a> * <rows a>.sum(-1, keepdim=True).softmax(1)).sum(1)",
        "torch.stack([row.amax(0) for row in <rows>])",
    ],
    "whole": [
        "<rows>.argmax(-1)",
        "(<rows>.sum(-1) > 0).long()",
        "(<flat>.abs() * 3).long().clamp(max=15)",
        "(<whole> + <small>) % 16",
        "<whole> // 2",
        "torch.arange(<size>).remainder(16).expand(b, -1)",
    ],
    "number": [
        "n",
        "n",
        "b",
        "<rows>.shape[1]",
        "<flat>.size(-1)",
        "<rows>.numel() // 4",
        "len(<rows>)",
        "<number> // <small>",
        "<number> % <small>",
        "max(<number> - <small>, 1)",
        "min(<number>, <digit>)",
        "abs(<number> - <small>)",
        "<number> + <small>",
        "int(<number> * 0.5)",
        "round(<number> / <small>)",
        "math.ceil(<number> / <small>)",
        "-(-<number> // <small>)",
        "(<number> + 3) // 4 * 4",
        "(<small> if <condition> else <digit>)",
        "(n if n < <digit> else <digit>)",
        "int(math.log2(<number> + 1))",
        "int(math.sqrt(<number>))",
        "len(range(0, <number>, <small>))",
        "len(<rows>.split(<small>, 1))",
        "sum(1 for i in range(<number>) if i % 2)",
        "divmod(<number>, <small>)[0]",
        "(<number> ^ 1)",
        "k",
    ],
    "size": ["<number> + 1", "max(<number>, 1)", "n", "2 * n", "n + <small>"],
    "small": ["2", "3", "2", "4"],
    "digit": ["0", "1", "2", "3"],
    "real": ["0.5", "2.0", "math.sqrt(<number> + 1)", "1 / (1 + <number>)", "float(<number>)", "scale", "-1.5"],
    "condition": [
        "n > <limit>",
        "n < <limit>",
        "n == <limit>",
        "n % <small> == 0",
        "n % <small>",
        "b == 1",
        "b != n",
        "<number> > <limit>",
        "<number> == <digit>",
        "<number> in (2, 5, 8)",
        "2 <= <number> < <limit>",
        "<condition> and <condition>",
        "<condition> or <condition>",
        "not (<condition>)",
        "<number> * <number> > 40",
        "<number> <= <number>",
        "<rows a>.shape == <rows b>.shape",
        "n * 0.5 > <number>",
        "mask is None",
        "y is not None",
        "y is not None and y.shape[1] > <limit>",
        "scale > 1",
        "k > 2",
        "<states>.sum() > 0",
        "<rows>.max().item() > 1.5",
        "bool((<rows> < -2).any())",
        "torch.is_tensor(mask) and mask.shape[1] == n",
        "any(i == <digit> for i in (n, b, <number>))",
        "str(n) in ('5', '7', '9')",
        "bool(<number>)",
    ],
    "decision": [
        "i % <small> == 0",
        "i % <small>",
        "i > <digit>",
        "i == <limit>",
        "i < n - 1",
        "i in (0, 2, 5)",
        "1 <= i < <limit>",
        "not i",
        "row.sum() > 0",
        "row.max().item() > 1",
        "bool((row < -1.5).any())",
        "<same states>.abs().max() > <real>",
        "<decision> and <decision>",
        "<decision> or <decision>",
        "not (<decision>)",
        "<condition>",
    ],
    "change": [
        "<same states> = <same states> * 0.9 + row",
        "<same states> = torch.tanh(<same states> - row)",
        "<same states> = <same states> + (1.0 if <decision> else <real>)",
        "<same states> = row if <decision> else <same states> * 0.5",
        "step = self.linear(row)\n        <same states> = <same states> * 0.5 + step",
        "<same states> = <same states> + i",
        "last = row * i",
        "filled[:, i] = row * 2",
        "filled[:, i] = <same states>",
    ],
    "limit": ["4", "5", "6", "7", "8", "9", "12"],
    "statement": [
        "<new rows> = <rows>",
        "<new rows> = <rows>",
        "<new rows> = <rows>",
        "<new rows> = <rows>",
        "<new flat> = <flat>",
        "<new states> = <states>",
        "<new whole> = <whole>",
        "<new number> = <number>",
        "<new number> = <number>",
        "if <condition>:\n    <new rows> = <rows>\nelse:\n    <same rows> = <rows>",
        "<new rows> = <rows a>\nif <condition>:\n    <same rows> = <rows>",
        "<new states> = <states>\nif <condition>:\n    <same states> = <states>\n"
        "elif <condition>:\n    <same states> = <states>",
        "<new number> = <digit>\nif <condition>:\n    <same number> = <number>",
        "<new states> = <states>\nfor i in range(<number>):\n    <same states> = <same states> * 0.9 + <real> * i",
        "<new states> = <states>\nfor row in <rows>.unbind(1):\n    <same states> = torch.tanh(<same states> + row)",
        "<new states> = <states>\nfor i in range(<rows a>.shape[1]):\n    if i % <small>:\n        continue\n"
        "    <same states> = <same states> * 0.5 + <rows a>[:, i]",
        *_LOOPS,
        *_LOOPS,
        "<new states> = <states>\nfor i, part in enumerate(<rows>.split(<small>, dim=1)):\n"
        "    <same states> = <same states> + part.mean(1) * i\n    if i > <limit>:\n        break",
        "<new rows> = <rows>\nwhile <same rows>.shape[1] > <limit>:\n    <same rows> = <same rows>[:, ::2]",
        "found = []\nfor i in range(<rows a>.shape[1]):\n    found.append(<rows a>[:, i] * i)\n"
        "<new rows> = torch.stack(found, 1)",
        "<new rows> = torch.zeros(b, <size>, 4)\n<same rows>[:, : <number>] = <real>",
        "<new rows> = <rows>.clone()\n<same rows>[:, <digit>:] += <states>[:, None]",
        "<new rows> = <rows>.clone()\n<same rows>[:, -1] = <states>",
        "<new rows> = <rows>.clone()\nfor i in range(1, <same rows>.shape[1]):\n"
        "    <same rows>[:, i] = <same rows>[:, i] + 0.5 * <same rows>[:, i - 1]",
        "try:\n    <new rows> = <rows a>.view(b, -1, 2, 4).sum(2)\nexcept RuntimeError:\n    <same rows> = <rows a>",
        "if <condition>:\n    return <rows>",
        "if <condition>:\n    raise ValueError('not supported')",
        "assert <condition>",
        "<new rows> = <rows a>\nif mask is not None:\n    <same rows> = <rows a> * 1.0\n"
        "    <same states> = (x * mask[..., None]).sum(1)\nelse:\n    <same states> = x.sum(1)",
        "if mask is not None:\n    <new flat> = (x.sum(-1)).masked_fill(~mask, -1e4).softmax(-1)\n"
        "else:\n    <same flat> = x.sum(-1)",
        "<new rows> = x if y is None else torch.cat([y, x], 1)",
        "<new rows> = x if y is None else F.scaled_dot_product_attention(x, y, y)",
        "<new states> = x.mean(1)\nif y is not None:\n    <same states> = <same states> + y.sum(1)",
        "b, n = <rows a>.shape[:2]",
        "parts = {'a': <rows>, 'b': <rows>}\n<new rows> = parts['a' if <condition> else 'b']",
        "lengths = (x.sum(-1) > 0).sum(1)\n<new flat> = (torch.arange(n)[None] < lengths[:, None]).float()",
        "self.count = self.count + 1",
        "<new number> = k\nwhile <same number> < <limit>:\n    <same number> += <small>",
        "with torch.no_grad():\n    <new rows> = <rows>",
        "<new rows>, <new flat> = (<rows>, <flat>) if <condition> else (<rows>, <flat>)",
    ],
}

_HEAD = """import functools
import math

import torch
from torch import nn
from torch.nn import functional as F


def pooled(x, count):
    if x.shape[1] < count:
        return x
    return x[:, : x.shape[1] // count * count].reshape(len(x), -1, count, 4).amax(2)


def scaled(x, limit=6):
    length = x.size(1)
    if length > limit:
        return x * (limit / length)
    return x + 1


def joined(a, b):
    if a.shape[1] == b.shape[1]:
        return a + b
    return torch.cat([a, b], dim=1)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.window = 6

    def forward(self, x):
        length = x.shape[-2]
        mask = torch.ones(length, length).tril()
        if length > self.window:
            mask = mask.triu(1 - self.window)
        scores = x @ self.linear(x).transpose(1, 2) + torch.where(mask > 0, 0.0, float("-inf"))
        return scores.softmax(-1) @ x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.inner, self.embed = nn.Linear(4, 4), nn.LayerNorm(4), Inner(), nn.Embedding(16, 4)
        self.conv, self.rnn = nn.Conv1d(4, 4, 3, padding=1), nn.GRU(4, 4, batch_first=True)
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("table", torch.randn(64, 4))

    def forward(self, x, mask=None, y=None, k=3, scale=0.5):
        b, n, _ = x.shape
"""


class Drawing:
    """The text of one model while it is drawn."""

    def __init__(self, seed: int, statements: int) -> None:
        self.random = random.Random(seed)
        self.statements = statements
        self.variables = {"rows": ["x"], "flat": [], "states": [], "whole": [], "number": []}
        self.made: list[str] = []
        self.has_tensors = False

    def source(self) -> str:
        """Returns the module that defines ``Model``."""
        lines = [line for _ in range(self.statements) for line in self._statement().split("\n")]
        results = ", ".join([*self.made, *([] if self.has_tensors else ["x * 2"])])
        return _HEAD + "\n".join(f"        {line}" for line in [*lines, f"return {results}"]) + "\n"

    def _statement(self) -> str:
        new: dict[str, str] = {}
        text = self._expanded(self.random.choice(GRAMMAR["statement"]), {}, new, 0)
        for kind, name in new.items():
            self.variables[kind].append(name)
            self.made.append(name)
            self.has_tensors |= kind != "number"
        return text

    def _expanded(self, template: str, same: dict[str, str], new: dict[str, str], depth: int) -> str:
        def chosen(found: re.Match[str]) -> str:
            words = found[1].split()
            if words[0] in ("new", "same"):
                return new.setdefault(words[1], f"{words[1]}{len(self.made) + len(new)}")
            if len(words) == 2:  # a variable that is the same wherever it occurs
                known = self.variables[words[0]] or [f"({self._drawn(words[0], new, depth + 1)})"]
                return same.setdefault(found[1], self.random.choice(known))
            return self._drawn(words[0], new, depth + 1)

        return re.sub(r"<(\w+(?: \w+)?)>", chosen, template)

    def _drawn(self, kind: str, new: dict[str, str], depth: int) -> str:
        known = self.variables.get(kind)
        deep = depth > 1 and kind in self.variables
        if known and (depth > 3 or (deep and self.random.random() < 0.7)):
            return self.random.choice(known)
        choices = GRAMMAR[kind]
        if depth > 3:  # the shortest ones end the drawing
            fewest = min(text.count("<") for text in choices)
            choices = [text for text in choices if text.count("<") == fewest]
        return self._expanded(self.random.choice(choices), {}, new, depth)


def _module(source: str) -> Any:
    """The module with this source, written to a file: rewrites only look at code that they can read."""
    name = f"generated_{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        path = Path(tempfile.gettempdir()) / "exportkit-generated" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def _call(seed: int, batch: int, length: int, factor: float, like: dict[str, Any]) -> Call:
    """A call with the optional arguments that ``like`` has, at these sizes."""
    numbers = torch.Generator().manual_seed(seed)
    values = {name: value for name, value in like.items() if name in ("k", "scale")}
    if "mask" in like:
        values["mask"] = torch.rand(batch, length, generator=numbers) > 0.3
    if "y" in like:
        values["y"] = torch.randn(batch, max(length + like["y"], 1), 4, generator=numbers) * factor
    return Call((torch.randn(batch, length, 4, generator=numbers) * factor,), values)


def _optional(draw: random.Random) -> dict[str, Any]:
    """Arguments besides ``x``: ``y`` is how much longer than ``x`` it is."""
    chances = {"mask": (0.4, True), "y": (0.4, draw.choice([0, 0, 1, -1, 3])), "k": (0.2, draw.randint(1, 6))}
    chances["scale"] = (0.2, draw.choice([0.25, 1.5, 2.0]))
    return {name: value for name, (chance, value) in chances.items() if draw.random() < chance}


SIZES = [
    (1, 1),
    (1, 5),
    (2, 1),
    (3, 2),
    (2, 3),
    (2, 4),
    (5, 5),
    (2, 6),
    (1, 8),
    (4, 9),
    (2, 12),
    (7, 7),
    (3, 15),
    (2, 33),
]


def _calls(seed: int) -> tuple[list[Call], list[Call]]:
    """The calls that are recorded, and others."""
    draw = random.Random(f"calls {seed}")
    sizes = draw.sample([(2, 5), (3, 7), (4, 6), (2, 9), (1, 4), (3, 8), (2, 10), (1, 6)], draw.choice([2, 2, 3]))
    shared = _optional(draw)
    given = [shared if draw.random() < 0.7 else _optional(draw) for _ in sizes]
    recorded = [_call(seed + 97 * i, *size, 1.0, like) for i, (size, like) in enumerate(zip(sizes, given, strict=True))]
    others = [
        _call(seed + 1000 + i, *size, draw.choice([1.0, 1.0, 0.1, 5.0]), draw.choice(given))
        for i, size in enumerate([*SIZES, *sizes])
    ]
    return recorded, others


def _runs(make: Callable[[], nn.Module], calls: list[Call]) -> bool:
    """Whether the model takes the calls, and has finite results."""
    torch.manual_seed(0)
    model = make().eval()
    model.count = 0
    try:
        results = [model(*call.copied().args, **call.copied().kwargs) for call in calls]
    except Exception:
        return False
    tensors = [leaf for result in results for leaf in (result if isinstance(result, tuple) else [result])]
    return all(not isinstance(leaf, torch.Tensor) or bool(leaf.isfinite().all()) for leaf in tensors)


def _made(source: str) -> nn.Module:
    model = _module(source).Model()
    model.count = 0
    return model


def generated(seed: int) -> Case:
    """Returns the case of a seed: the first model that is drawn and runs with the calls that are recorded."""
    recorded, others = _calls(seed)
    for turn in range(1000):
        source = Drawing(seed * 1000 + turn, 1 + seed % 5).source()
        try:
            make = functools.partial(_made, source)
            works = _runs(make, recorded)
        except SyntaxError:
            continue
        if works:
            body = source.removeprefix(_HEAD)
            return Case(f"seed {seed}", "generated", make, recorded, truth=others, may_refuse=True, source=body)
    raise RuntimeError(f"no model of seed {seed} runs")
