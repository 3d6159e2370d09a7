"""From recorded calls to a plan: sizes suggest it, the model confirms it, and findings report on the inputs.

The model runs in eager mode at small sizes. Rows repeated must give repeated rows in the outputs: that is the batch.
Lengths of tokens that never varied are changed, and vary if the model accepts that. Axes that had equal sizes in all
calls are pulled apart, and stay apart if the model accepts that in both directions. An attention mask that no call had
is restored if it changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from exportkit.arguments.build import padded
from exportkit.arguments.table import call_table, constants_of, structure_of, varying_numbers
from exportkit.calls.observation import Observation
from exportkit.errors import PlanError
from exportkit.plan.infer import infer_plan, name_variables
from exportkit.plan.leaves import Finding
from exportkit.plan.plan import Plan
from exportkit.plan.solved_sizes import solve_sizes
from exportkit.plan.tables import first_of
from exportkit.probing.batch import confirm_batch
from exportkit.probing.lengths import add_relations, extend_tokens, follow_encoder, pull_apart
from exportkit.probing.model_probe import ModelProbe
from exportkit.probing.placeholders import ValueRelations, find_value_relations
from exportkit.probing.simplify import simplify_calls
from exportkit.probing.unpadded import MASK, with_optional_mask
from exportkit.running.eager import replayed
from exportkit.running.runner import compare_calls, recorded
from exportkit.trees import flatten, is_cache_class, stored_length
from exportkit.trees.tree import dtype_name

_SHOWN = 4  # inputs that one finding names
_INSTEAD = {
    "sparse": "pass its indices and values as two tensors, and multiply with index_add; or pass x.to_dense().",
    "nested": "pass a padded tensor and the lengths, or a mask.",
}


@dataclass(frozen=True, eq=False)
class BoundPlan(Plan):
    """A plan together with the calls it was made from: what `InputObserver.plan` returns and `exportkit.export` takes.

    It prints, compares and is edited like any `Plan`; an edited one is bound to the same calls.

    Attributes:
        observation: The calls, in the form that the plan describes: without tensors that the model never reads, with a
            list of tensors as one, and with an attention mask that was restored.
    """

    observation: Observation = field(kw_only=True, repr=False)

    @classmethod
    def of(cls, plan: Plan, observation: Observation) -> BoundPlan:
        """Returns a plan bound to the calls it was made from."""
        return cls(**plan.fields(), observation=observation)

    @property
    def plan(self) -> Plan:
        """The plan by itself, which is plain data."""
        return Plan(**self.fields())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.fields() == other.fields()

    __hash__ = None  # type: ignore[assignment]  # a plan holds dictionaries


def plan_calls(
    observation: Observation,
    model: torch.nn.Module | None = None,
    method: str = "forward",
    *,
    needs_cache: bool = True,
) -> BoundPlan:
    """Returns the plan for the recorded calls.

    Args:
        observation: The calls.
        model: The model, to confirm by running it what the sizes suggest; None to use the sizes alone.
        method: The observed method.
        needs_cache: Whether a mask is restored only beside a cache; the encoder of a model with a cache has none.

    Raises:
        PlanError: if an input of a model is sparse or nested.
    """
    if model is None:
        plan = infer_plan(call_table(observation), constants_of(observation))
    else:
        _check_dense(observation)
        simple = simplify_calls(replayed(observation, model, method), model, method)
        probe = ModelProbe(model, method, simple.observation)
        relations = find_value_relations(probe)
        plan, observation = _confirmed(probe, relations), simple.observation
        masked = restore_mask(plan, probe, needs_cache=needs_cache)
        if masked is not None:
            plan, observation = _confirmed(ModelProbe(model, method, masked), relations), masked
            text = (
                f"{MASK} was never given to forward, because generate drops a mask of ones; it is an input of the "
                "graph all the same, so that padded batches can be served. If it is left out, it is all ones."
            )
            plan = plan.with_findings([Finding("restored input", MASK, text)])
        else:
            plan = with_optional_mask(plan, probe)
        plan = replace(plan, joined=simple.joined, unused=simple.unused, passed_through=simple.passed_through)
    if observation.restored:
        leaves = [replace(leaf, restored=leaf.argument in observation.restored) for leaf in plan.leaves]
        plan = replace(plan, leaves=tuple(leaves))
    plan = replace(plan, structure=structure_of(observation))
    return BoundPlan.of(plan.with_findings(findings_of_inputs(plan, observation)), observation)


def _check_dense(observation: Observation) -> None:
    """Raises an error for inputs whose shapes do not say what they hold, and which ONNX does not have."""
    for call in observation.calls:
        for path, tensor in call.tensors().items():
            if tensor.is_nested or tensor.layout is not torch.strided:
                kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
                raise PlanError(
                    "An input is not a dense tensor.",
                    where=path,
                    expected="a dense tensor",
                    got=f"a {kind} tensor",
                    hint=_INSTEAD["nested" if tensor.is_nested else "sparse"],
                )


def _confirmed(probe: ModelProbe, relations: ValueRelations) -> Plan:
    plan = relations.added_to(infer_plan(probe.table, constants_of(probe.observation)))
    plan = follow_encoder(extend_tokens(confirm_batch(plan, probe), probe))
    if not probe.accepts_lengths(plan):
        plan = add_relations(plan, probe)
    plan = name_variables(pull_apart(plan, probe))
    if plan.with_role("batch") is not None:  # maybe one that looked like a multiple of another size before
        plan = replace(plan, findings=tuple(finding for finding in plan.findings if finding.kind != "batch"))
    return plan


def restore_mask(plan: Plan, probe: ModelProbe, *, needs_cache: bool) -> Observation | None:
    """Returns the calls with a mask of ones, or None if there is nothing to restore.

    ``generate`` drops a mask that is all ones (transformers 5.23), and a graph without a mask cannot serve a padded
    batch. So if a decoder with a cache takes a mask and was given none, each call gets a mask of ones, provided that
    the model returns the same with it. The mask is ``(batch, past + new)``; if the cache holds a state that does not
    grow, it is ``(batch, new)``, and beside an encoder, ``(batch, encoder)``.

    Args:
        plan: What the calls without a mask suggest.
        probe: The model and its calls.
        needs_cache: Whether the model has to have a cache.
    """
    observation = probe.observation
    wanted = MASK in observation.signature.plain() and MASK not in observation.removed
    if not wanted or any(call.has(MASK) for call in observation.calls):
        return None
    masked = _with_masks(plan, observation, needs_cache)
    if masked is None:
        return None
    whole = [masked.calls[0], *masked.calls[1:][-1:]]
    if not probe.repeats(whole):
        return None
    # A 0 in the mask has to change a result: otherwise it is a mask over something else, or is ignored. In a call past
    # the window of a model, what the mask hides may have left the window before.
    hiding = []
    for call in whole:
        mask = flatten(padded(call.tensors()[MASK].clone()))
        hiding.append(replace(call, arguments={**call.arguments, MASK: mask}))
    if not any(outcome.wrong for outcome in compare_calls(recorded, probe.run, hiding)):
        return None
    return replace(masked, restored=observation.restored | {MASK})


def _with_masks(plan: Plan, observation: Observation, needs_cache: bool) -> Observation | None:
    past, new, batch = plan.with_role("past"), plan.new_tokens, plan.with_role("batch")
    if new is None or batch is None or (needs_cache and past is None and not _has_state(observation)):
        return None

    followed = {variable.follows for variable in plan.variables}
    encoder = next((variable for variable in plan.variables if variable.name in followed), None)

    def mask_shape(sizes: Mapping[str, int], counted: int = 0) -> tuple[int, int]:
        if encoder is not None:
            return sizes[batch.name], sizes[encoder.name]
        return sizes[batch.name], sizes[new.name] + (0 if past is None else max(sizes[past.name], counted))

    calls = []
    for call in observation.calls:
        counted = stored_length(call.values())
        shape = mask_shape(solve_sizes(plan, call.shapes()), counted)
        device = next(iter(call.tensors().values())).device
        arguments = {**call.arguments, MASK: flatten(torch.ones(shape, dtype=torch.int64, device=device))}
        ordered = observation.signature.in_order(arguments)
        calls.append(replace(call, arguments=ordered, named=call.named | {MASK}))
    further = []
    for seen in observation.further:
        sizes = solve_sizes(plan, seen.inputs)
        if past is None or past.maximum is None or sizes[past.name] < past.maximum:  # no full windows hide the past
            further.append(replace(seen, inputs={**seen.inputs, MASK: mask_shape(sizes)}))
    return replace(observation, calls=tuple(calls), further=tuple(further))


def _has_state(observation: Observation) -> bool:
    """Whether there is a cache, and none that grows."""
    trees = [tree for call in observation.calls for tree in call.arguments.values() if is_cache_class(tree.cls)]
    return any(tree.tensor_paths for tree in trees) and not any(tree.growing for tree in trees)


def findings_of_inputs(plan: Plan, observation: Observation) -> list[Finding]:
    """Returns findings: inputs that no call gave, or that are never read, and axes that were seen with one size only.

    Args:
        plan: The plan that the findings belong to.
        observation: The calls.
    """
    found = []
    given = {name for call in observation.calls for name in call.arguments if call.has(name)} | observation.removed
    missing = ", ".join([name for name in observation.signature.plain() if name not in given])
    if missing:
        found.append(Finding("never given", missing, f"never passed, so not a graph input: {missing}."))
    found += _changing_inputs(plan, observation)
    for path, kind in observation.signature.numbers.items():
        form = "the last size of a tensor without elements" if kind == "size" else "a tensor without axes"
        found.append(Finding("number", path, f"{path} varies: the program takes this Python number as {form}."))
    for path in varying_numbers(observation):
        text = f"{path} has several values; export(model, observer) makes it an input if the graph can compute with it."
        found.append(Finding("several values", path, text))
    for path in plan.joined:
        text = f"{path} is one input: its tensors, however many are given, are concatenated."
        found.append(Finding("joined", path, text))
    unused = ", ".join(plan.unused)
    if unused:
        found.append(Finding("never read", unused, f"passed but never read, so not a graph input: {unused}."))
    return [*found, *one_size(plan)]


def _changing_inputs(plan: Plan, observation: Observation) -> list[Finding]:
    """Returns findings: inputs whose dtype changes between calls, and those that the graph is exported without."""
    dtypes: dict[str, dict[str, int]] = {}  # of each leaf, the first call with each
    for number, call in enumerate(observation.calls):
        for path, tensor in call.tensors().items():
            dtypes.setdefault(path, {}).setdefault(dtype_name(tensor.dtype), number)
    found, others = [], []
    for path, calls in dtypes.items():
        leaf = plan.by_path.get(path)
        if leaf is None and path not in plan.unused:
            others.append(f"{path} (call {min(calls.values())})")
        elif leaf is not None and len(calls) > 1:
            listed = ", ".join(f"{dtype} in call {number}" for dtype, number in calls.items())
            text = f"{path} is {listed}; the graph takes {leaf.dtype} only."
            found.append(Finding("dtype", path, text))
    if others:
        where = ", ".join(others)
        text = f"missing from the call with the most tensors, so not a graph input: {where}."
        found.append(Finding("other inputs", where, text))
    return found


def one_size(plan: Plan) -> list[Finding]:
    """Returns which axes of inputs are static, except for caches and sizes of 1.

    Heads, states and broadcast axes are meant to be static.
    """
    caches = {leaf.argument for leaf in plan.leaves if leaf.growing is not None}
    texts = []
    for leaf in plan.leaves:
        axes = [str(axis) for axis, size in enumerate(leaf.sizes) if size.is_static and size.constant > 1]
        if axes and leaf.argument not in caches:
            texts.append(f"{leaf.path} axis {', '.join(axes)}")
    if not texts:
        return []
    where = first_of(texts, _SHOWN, "; ")
    return [Finding("one size", where, f"seen with one size only, so static: {where}.")]
