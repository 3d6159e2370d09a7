"""The translation to ONNX by torch.onnx and onnxscript: messages, and what their optimiser does to a graph."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from exportkit._torch_compat import require

_TO_THE_END = 2**63 - 1  # the end of a slice without an end
_registries: dict[Any, Any] = {}  # the translations of torch.onnx, by what they depend on


@contextlib.contextmanager
def quiet_onnx_export() -> Iterator[None]:
    """Silences log messages and warnings of torch's ONNX exporter. Seen in torch 2.13, onnxscript 0.7."""
    import logging
    import warnings

    levels = {}
    for logger in map(logging.getLogger, ("torch.onnx", "onnxscript", "onnx_ir")):
        levels[logger] = logger.level
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def rotary_fusion() -> tuple[Any, Any]:
    """Returns onnxscript's rule for rotary embeddings, and the part of its pattern that turns the values.

    Seen in onnxscript 0.7.
    """
    from onnxscript.rewriter.rules.fusion import _rotary_embedding

    names = ("RotaryEmbedding23Fusion", "_rotate_half_pattern")
    rule, turned = (require(_rotary_embedding, name, "onnxscript 0.7") for name in names)
    return rule, turned


def exact_no_ops() -> list[tuple[Any, dict[str, float]]]:
    """Returns the attributes to replace, each with its owner, so that ``x + epsilon`` is never optimised away.

    onnxscript removes ``x + 0`` and ``x * 1``, and takes every constant up to 1e-8 for zero, the epsilon of a norm
    among them. Seen in onnxscript 0.7; the list is empty for versions without these tolerances.
    """
    try:
        from onnxscript.rewriter.rules.common import _no_op

        values = [value for rule in _no_op.rules.rules for node in rule._target_pattern for value in node.inputs]
    except (ImportError, AttributeError):
        return []
    exact = {"_abs_tol": 0.0, "_rel_tol": 0.0}
    return [(value, exact) for value in values if exact.keys() <= vars(value).keys()]


def slices_kept() -> list[tuple[Any, dict[str, Any]]]:
    """Returns the attributes to replace, each with its owner, so that ``x[:, -6:]`` stays a slice.

    onnxscript takes it out if the example had up to 6 elements. Seen in onnxscript 0.7.
    """
    try:
        from onnxscript.rewriter.rules.common import _collapse_slices

        rule = _collapse_slices.collapse_slice2_rule
        is_same = rule._condition_function
    except (ImportError, AttributeError):
        return []

    def is_redundant(*args: Any, data: Any, starts: Any, ends: Any, axes: Any, **values: Any) -> Any:
        limits = [limit.const_value for limit in (starts, ends)]
        is_fixed = any(limit is not None and not set(limit.numpy().flat) <= {0, _TO_THE_END} for limit in limits)
        if is_fixed and data.shape is not None:
            places = range(len(data.shape)) if axes.const_value is None else axes.const_value.numpy().flat
            if any(data.shape.is_dynamic(place) for place in places):
                return False
        return is_same(*args, data=data, starts=starts, ends=ends, axes=axes, **values)

    return [(rule, {"_condition_function": is_redundant})]


def versions_inside() -> list[tuple[Any, dict[str, Any]]]:
    """Returns the attributes to replace, each with its owner, so that bodies of loops get the operators of the opset.

    torch.onnx writes a loop with the opset of the file, and onnxscript then leaves its body as it is. Also, torch.onnx
    gives the domain of the functions for bodies two versions where one loop is in another. Seen in torch 2.13 and
    onnxscript 0.7.
    """
    try:
        from onnxscript.version_converter import _version_converter
        from torch.onnx._internal.exporter import _constants, _ir_passes

        converter = _version_converter._VersionConverter
        visit, visit_attribute = converter.visit_graph_or_function, converter.visit_attribute
        set_version, bodies = _ir_passes._maybe_set_opset_version, _constants.LOCAL_FUNCTION_DOMAIN
    except (ImportError, AttributeError):
        return []

    def visit_all(self: Any, graph: Any) -> None:
        visit(self, graph)
        for node in graph:
            for attribute in node.attributes.values():
                visit_attribute(self, attribute)

    def set_one(imports: dict[str, int], domain: str, version: int | None) -> None:
        set_version(imports, domain, None if domain == bodies else version)

    return [
        (converter, {"visit_graph_or_function": visit_all}),
        (_ir_passes, {"_maybe_set_opset_version": set_one}),
    ]


def limits_with_names() -> list[tuple[Any, dict[str, Any]]]:
    """Returns the attributes to replace, each with its owner, so that a value may have limits twice.

    onnxscript makes one Clip of ``Min(Max(x, a), b)``, and names its limits after ``x``. The limits of a second one are
    not in the graph. Seen in onnxscript 0.7.
    """
    try:
        from onnxscript.rewriter.rules.common import _min_max_to_clip as rules

        owners = (rules.FuseSuccessiveMin, rules.FuseSuccessiveMax, rules.FuseMaxMinToClip, rules.FuseMinMaxToClip)
        originals = [owner.compute_constants for owner in owners]
    except (ImportError, AttributeError):
        return []

    def named(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda rule, first, second, _name="": original(rule, first, second, second.outputs[0].name)

    return [(owner, {"compute_constants": named(own)}) for owner, own in zip(owners, originals, strict=True)]


def limits_kept() -> list[tuple[Any, dict[str, Any]]]:
    """Returns the attributes to replace, each with its owner, so that limits after other limits stay.

    onnxscript makes one Clip of two, and of a Relu and a Clip. If the limits do not overlap, the result differs, and
    a second pair of them for the same value is not in the graph. Seen in onnxscript 0.7.
    """
    try:
        from onnxscript.rewriter.rules.common import _fuse_relus_clips as fused

        rules = (fused.successive_clip_rule, fused.successive_clip_relu_rule, fused.successive_relu_clip_rule)
    except (ImportError, AttributeError):
        return []
    return [(rule, {"_condition_function": lambda *_args, **_values: False}) for rule in rules]


def tables_kept() -> list[tuple[Any, dict[str, Any]]]:
    """Returns the attributes to replace, each with its owner, so that tables of operators are made once.

    torch.onnx reads the source of all its translations for each export, and the annotations of those it is given;
    torch.export lists all operators of torch several times, and it registers thousands of functions, each of which is
    checked for kinds of keys that do not occur here: most of the time that the export of a small model takes. Seen in
    torch 2.13.
    """
    try:
        from torch._C import DispatchKey
        from torch._export import utils
        from torch._ops import OpOverload
        from torch.onnx._internal.exporter import _schemas
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        original = vars(ONNXRegistry)["from_torchlib"].__func__
        listed = utils._materialize_cpp_cia_ops
        registers = OpOverload.py_impl
        signatures = _kept(_schemas.op_signature_from_function)
    except (ImportError, AttributeError, KeyError):
        return []

    def from_torchlib(cls: Any, *args: Any, **options: Any) -> Any:
        # operators of torchvision are found once it is imported
        key = cls, "torchvision" in sys.modules, args, tuple(options.items())
        if key not in _registries:
            _registries[key] = original(cls, *args, **options)
        registry = copy.copy(_registries[key])
        registry.functions = {target: list(found) for target, found in registry.functions.items()}
        return registry

    def py_impl(operator: Any, key: Any) -> Callable[[Any], Any]:
        if type(key) is not DispatchKey or key == DispatchKey.Python:
            return registers(operator, key)

        def register(function: Any) -> Any:
            if key in operator.py_kernels:
                return registers(operator, key)(function)  # which is an error
            operator.py_kernels[key] = function
            operator._dispatch_cache.clear()
            return function

        return register

    return [
        (ONNXRegistry, {"from_torchlib": classmethod(from_torchlib)}),
        (utils, {"_materialize_cpp_cia_ops": functools.cache(listed)}),
        (OpOverload, {"py_impl": py_impl}),
        (_schemas, {"op_signature_from_function": signatures}),
    ]


@functools.cache
def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with results that are kept for the life of the process."""
    return functools.cache(function)


def quick_matches() -> list[tuple[Any, dict[str, Any]]]:
    """Returns the attributes to replace, each with its owner, so that rewriting a graph takes time linear in its size.

    For a rule with two results, such as two slices of one tensor, onnxscript tries each node with all others, which
    takes minutes with a few thousand of them. Seen in onnxscript 0.7.
    """
    try:
        from onnxscript.rewriter import _DEFAULT_REWRITE_RULES
        from onnxscript.rewriter._basics import MatchResult

        found = [(rule._matcher, rule._matcher.pattern.output_nodes) for rule in _DEFAULT_REWRITE_RULES]
        pairs = [(m, nodes[0].op_identifier(), nodes[1].op_identifier()) for m, nodes in found if _of_one_input(nodes)]
    except (ImportError, AttributeError, TypeError):
        return []

    def quick(matcher: Any, first: str, second: str) -> Callable[..., Any]:
        match = matcher.match

        def matched(model: Any, graph: Any, node: Any, **options: Any) -> Any:
            given = node.inputs[0] if node.op_type == first and node.inputs else None
            others = [use.node for use in given.uses() if use.node is not node] if given is not None else []
            if any(other.op_type == second for other in others):
                return match(model, graph, node, **options)
            return MatchResult().fail(f"No {first} and {second} of one value.")

        return matched

    return [(m, {"match": quick(m, first[1], second[1])}) for m, first, second in pairs if first and second]


def _of_one_input(nodes: Any) -> bool:
    """Whether the results of a pattern are made by two nodes that read the same value first."""
    return len(nodes) == 2 and all(node.inputs for node in nodes) and nodes[0].inputs[0] is nodes[1].inputs[0]
