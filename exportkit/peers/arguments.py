"""The arguments that ``torch.onnx.InputObserver`` infers: a recorded call, completed with what it lacks.

They describe what was recorded; arguments to export with come from the plan (`exportable_arguments`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from exportkit._torch_compat.memory import protected_copy
from exportkit.arguments.build import build_call
from exportkit.arguments.table import growth_by_path
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.errors import InvalidRequestError, PlanError
from exportkit.peers.dynamic_shapes import any_named, dynamic_axes, without_caught_flags
from exportkit.plan.plan import Plan
from exportkit.plan.sizes import choose_sizes
from exportkit.running.compare import outputs_close
from exportkit.running.eager import EagerRunner
from exportkit.trees import Growth, Tree, flatten, join


def recorded_arguments(observation: Observation, which: Any, flat: bool, as_args_kwargs: bool) -> Any:
    """Returns a recorded call, or given values, completed with empty tensors for what is missing.

    The arguments are those of `InputObserver.infer_arguments`.
    """
    observation.require_calls()
    given = _given(observation, which)
    axes, growth = dynamic_axes(observation, None), growth_by_path(observation)
    last = {path: tensor for call in observation.calls for path, tensor in call.tensors().items()}
    completed = {}
    for name, tree in without_caught_flags(observation.merged_arguments, observation).items():
        have = given.get(name)
        own = {} if have is None else have.tensors()
        is_none = have is None or (len(have.leaves) == 1 and have.leaves[0] is None)
        complete = not is_none and len(own) >= len(tree.tensors())
        if have is not None and complete and name != observation.signature.var_keyword:
            completed[name] = have
            continue
        for path in tree.tensors():
            full = join(name, path)
            own.setdefault(path, _empty(last[full], axes[full], growth.get(full)))
        completed[name] = tree.with_leaves(own)
    past = (tensor for tree in completed.values() for path, tensor in tree.tensors().items() if path in tree.growing)
    empty = all(0 in tensor.shape for tensor in past)
    return _shaped(
        Call(completed, observation.signature, cached_tokens=0 if empty else None),
        any_named(observation),
        flat,
        as_args_kwargs,
    )


def _protected(call: Call) -> dict[str, Tree]:
    """The arguments of a call with tensors that a model may write without changing the recording.

    Large ones share memory with it until then.
    """
    return {name: tree.map(_own) for name, tree in call.arguments.items()}


def _own(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    copy = protected_copy(leaf)
    return leaf.clone() if copy is None else copy


def exportable_arguments(plan: Plan, observation: Observation, flat: bool, as_args_kwargs: bool) -> Any:
    """Returns arguments whose variable sizes are distinct and greater than 1, in the form of `recorded_arguments`."""
    observation.require_calls()
    call = build_call(plan, observation, choose_sizes(plan))
    kept = Call(without_caught_flags(call.arguments, observation), call.signature)
    return _shaped(kept, any_named(observation), flat, as_args_kwargs)


def _shaped(call: Call, by_name: bool, flat: bool, as_args_kwargs: bool) -> Any:
    """A call as a list of tensors, as ``(args, kwargs)``, as a tuple, or as a dict."""
    if flat:
        return list(call.tensors().values())
    signature = call.signature
    args, kwargs = signature.unbind(call.values(), None if by_name else ())
    if as_args_kwargs:
        return args, kwargs
    if args and kwargs:
        raise PlanError(
            "Inputs of *args are mixed with named inputs, so they are neither one tuple nor one dict.",
            where=f"*{signature.var_positional}" if signature.var_positional else ", ".join(signature.positional_only),
            hint="infer_arguments(as_args_kwargs=True) returns (args, kwargs).",
        )
    return kwargs if kwargs or by_name else args


def _given(observation: Observation, which: Any) -> Mapping[str, Tree]:
    if which is None:
        counts = [sum(map(_is_given, call.arguments.values())) for call in observation.calls]
        return _protected(observation.calls[counts.index(max(counts))])
    if isinstance(which, int) and not isinstance(which, bool):
        if not -len(observation.calls) <= which < len(observation.calls):
            raise InvalidRequestError(
                f"There is no recorded call {which}.", expected=f"0 to {len(observation.calls) - 1}", got=which
            )
        return _protected(observation.calls[which])
    if isinstance(which, tuple | dict):
        args, kwargs = (which, {}) if isinstance(which, tuple) else ((), which)
        _check_given(observation, args, kwargs)
        return {name: flatten(value) for name, value in observation.signature.bind(args, kwargs).items()}
    raise InvalidRequestError(
        f"Unexpected type {type(which).__name__} for the call to complete.",
        expected="None, the number of a recorded call, a tuple of positional or a dict of named arguments",
        got=repr(which)[:100],
    )


def _is_given(tree: Tree) -> bool:
    """Whether an argument is more than None; a cache without layers is."""
    return not tree.leaves or any(leaf is not None for leaf in tree.leaves)


def _check_given(observation: Observation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    signature = observation.signature
    for name in kwargs:
        if signature.var_keyword is None:
            signature.name_of(name)
    if signature.var_positional is None and len(args) > len(signature.plain()):
        raise InvalidRequestError(
            "More values were given than the method has inputs.",
            expected=f"at most {len(signature.plain())}: {', '.join(signature.plain())}",
            got=len(args),
        )


def flags_that_matter(observation: Observation, model: torch.nn.Module) -> dict[str, Any]:
    """Returns the flags that are left out of inferred arguments, if the model returns something else without them.

    Args:
        observation: The calls.
        model: The model, which is run.
    """
    catch_all = observation.signature.var_keyword or ""
    for call in observation.calls_with_values:
        fewer = without_caught_flags(call.arguments, observation)
        caught = call.arguments[catch_all].build() if catch_all in call.arguments else {}
        flags = {key: caught[key] for key in caught if catch_all not in fewer or key not in fewer[catch_all].build()}
        if not flags:
            continue
        run = EagerRunner(model, observation.method_name)
        try:
            without = run(call.with_arguments(fewer))
            matter = not outputs_close(call.outputs.tensors(), without) and not outputs_close(run(call), without)
        except Exception:  # whatever the model raises without them
            matter = True
        return flags if matter else {}
    return {}


def _empty(tensor: torch.Tensor, axes: list[int], growth: Growth | None) -> torch.Tensor:
    """The default for a missing tensor: empty along the axis that grows or varies, otherwise zeros."""
    axis = growth.axis if growth is not None else max(axes, default=None)
    if tensor.numel() == 0:
        return tensor
    if axis is None:
        return torch.zeros_like(tensor)
    shape = list(tensor.shape)
    shape[axis] = 0
    return tensor.new_empty(shape)
