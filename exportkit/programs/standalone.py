"""The body of the scripts that `exportkit.programs.repro` writes: from a description in JSON to torch.export.

The scripts need torch alone. Nothing here imports exportkit, unless the program was traced with rewrites of exportkit.
"""

# ruff: noqa: D102, D103  (functions of a script: their names say what they do)

import contextlib
import enum
import importlib
import inspect
import json
import sys
from typing import Any

import torch


def main(text: str) -> None:
    spec = json.loads(text)
    torch.manual_seed(spec["seed"])
    model = build_model(spec["model"])
    tensors = {path: random_tensor(**tensor) for path, tensor in spec["tensors"].items()}
    shapes = {path: {int(axis): dynamic(most) for axis, most in axes.items()} for path, axes in spec["dynamic"].items()}
    call, context = Call(model, spec), contextlib.nullcontext()  # type: Call, Any
    if spec["rules"]:
        call, context = with_rewrites(call, spec)
    with context, torch.no_grad():
        program = torch.export.export(call, (tensors,), dynamic_shapes=(shapes,))
    for path, node in zip(tensors, input_nodes(program), strict=True):
        print(path, tuple(map(str, node.meta["val"].shape)))
    print("ranges:", {str(size): str(allowed) for size, allowed in program.range_constraints.items()})
    if spec["onnx"]:
        torch.onnx.export(program, (), verbose=False)


def build_model(model: dict[str, Any]) -> Any:
    if model["cls"] is None:
        sys.exit(f"{model['name']} cannot be imported from here: build the model in build_model().")
    cls = found(model["cls"])
    if model["config"] is not None:
        built = cls(found(model["config_cls"]).from_dict(model["config"], attn_implementation=model["attention"]))
    elif model["arguments"] is not None:
        built = cls(**model["arguments"])
    else:
        sys.exit(f"It is not known how {model['name']} is built: build it in build_model().")
    built = built.to(getattr(torch, model["dtype"])) if model["dtype"] else built
    return built.train(model["training"]).requires_grad_(False)


class Call(torch.nn.Module):
    """Calls a method of the model with arguments that are built from plain tensors, and returns plain tensors."""

    def __init__(self, model: torch.nn.Module, spec: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.spec = model, spec
        self.around: Any = lambda call, values, _: call(values)

    def forward(self, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        values = {
            name: built(argument["layout"], [tensors[path] for path in argument["paths"]])
            for name, argument in self.spec["arguments"].items()
        }
        return tensors_in(self.around(self.call, values, tensors))

    def call(self, values: dict[str, Any]) -> Any:
        args, kwargs = [], {}
        for name, value in values.items():
            kind = self.spec["arguments"][name]["kind"]
            if kind == "positional":
                args.append(value)
            elif kind == "args":
                args.extend(value)
            elif kind == "kwargs":
                kwargs.update(value)
            else:
                kwargs[name] = value
        return getattr(self.model, self.spec["method"])(*args, **kwargs)


def with_rewrites(call: Call, spec: dict[str, Any]) -> tuple[Call, Any]:
    from exportkit.rewrites.table import BUILT_IN, adapted_call, applied
    from exportkit.trees import set_stored_length

    rules = [BUILT_IN[name] for name in spec["rules"] if name in BUILT_IN]
    names = inspect.signature(getattr(call.model, spec["method"])).parameters

    def around(method: Any, values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
        if spec["past"] is not None:
            path, axis = spec["past"]
            for value in values.values():
                set_stored_length(value, tensors[path].shape[axis])
        return adapted_call(rules, call.model, values, names, method)

    call.around = around
    return call, applied(rules, call.model)


def random_tensor(shape: list[int], dtype: str, low: int, high: int) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_floating_point or kind.is_complex:
        return torch.randn(shape, dtype=kind if kind.itemsize > 1 else torch.float32).to(kind)
    return torch.randint(low, high + 1, shape).to(kind)


def dynamic(most: int | None) -> Any:
    return torch.export.Dim.DYNAMIC if most is None else torch.export.Dim.DYNAMIC(max=most)


def built(layout: Any, tensors: list[torch.Tensor]) -> Any:
    """Returns the value that a layout describes; the number n stands for tensor n."""
    if isinstance(layout, list):
        return [built(item, tensors) for item in layout]
    if not isinstance(layout, dict):
        return layout
    kind = next(iter(layout))
    value = layout[kind]
    if kind == "tensor":
        return tensors[value]
    if kind == "tuple":
        return tuple(built(value, tensors))
    if kind == "dict":
        return {built(key, tensors): built(item, tensors) for key, item in value}
    if kind == "fields":
        cls, items = found(value), built(layout["items"], tensors)
        return cls(*items) if hasattr(cls, "_fields") else cls(items)
    if kind == "object":
        return built_object(found(value), {name: built(item, tensors) for name, item in layout["state"]})
    if kind == "registered":
        return built_fields(found(value), built(layout["context"], tensors), built(layout["items"], tensors))
    if kind == "enum":
        return found(value)[layout["name"]]
    return built_constant(kind, value)


def built_fields(cls: Any, names: Any, values: list[Any]) -> Any:
    """Returns a model output, or a dataclass; torch keeps the names of those that are None apart."""
    named, empty = (names, []) if all(isinstance(name, str) for name in names) else names
    return cls(**dict(zip(named, values, strict=True)), **dict.fromkeys(empty))


def built_constant(kind: str, value: Any) -> Any:
    if kind == "float":
        return float(value)
    if kind == "complex":
        return complex(*(built(part, []) for part in value))
    if kind == "type":
        return found(value)
    if kind == "torch":
        return getattr(torch, value)
    return torch.device(value) if kind == "device" else None


def built_object(cls: Any, state: dict[str, Any]) -> Any:
    """Returns a cache, or a layer of one."""
    if "sliding_window" in state:
        state["_sliding_window_tensor"] = torch.tensor(state["sliding_window"], dtype=torch.long)
    value: Any = object.__new__(cls)
    vars(value).update(state)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns all tensors in a value, whatever holds them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif not isinstance(value, (list, tuple)):
        foreign = type(value).__module__.partition(".")[0] in ("torch", "builtins") or isinstance(value, enum.Enum)
        value = [] if foreign else list(getattr(value, "__dict__", {}).values())
    return [tensor for item in value for tensor in tensors_in(item)]


def found(name: str) -> Any:
    module, _, qualified = name.partition(":")
    value: Any = importlib.import_module(module)
    for step in qualified.split("."):
        value = getattr(value, step)
    return value


def input_nodes(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    names = set(program.graph_signature.user_inputs)
    return [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
