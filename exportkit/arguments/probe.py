"""Lets the model itself confirm a plan: which axes are the batch, and which equal sizes belong together.

Each question is a run in eager mode at small sizes. Rows repeated must give repeated rows in the outputs; axes that had
equal sizes in all calls are pulled apart, and stay apart where the model accepts that in both directions.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from exportkit.arguments.build import Arguments, build_arguments, recorded_call
from exportkit.arguments.compare import close
from exportkit.arguments.eager import run_eager
from exportkit.arguments.sizes import choose_sizes
from exportkit.axes import CallTable, Expression, Finding, Leaf, Plan, Variable, infer_plan
from exportkit.axes.names import name_variables
from exportkit.axes.table import AxisKey, Sizes, known
from exportkit.errors import ExportkitError
from exportkit.observe import Observation
from exportkit.trees import Tree, flatten, join

_MOST_CHOICES = 32  # ways to choose the batch axes that are tried, an eager run or two each


def probe_plan(plan: Plan, table: CallTable, observation: Observation, model: torch.nn.Module, method: str) -> Plan:
    """Returns the plan as the model confirms it.

    Args:
        plan: What the sizes suggest.
        table: The seen sizes.
        observation: The calls.
        model: The model.
        method: The observed method.
    """
    probe = _Probe(table, observation, model, method)
    plan = probe.confirm_batch(plan)
    if not probe.runs(plan):
        plan = probe.add_relations(plan)
    return name_variables(probe.pull_apart(plan))


class _Probe:
    """The model and its calls, and the questions put to it."""

    def __init__(self, table: CallTable, observation: Observation, model: torch.nn.Module, method: str) -> None:
        self.table, self.observation, self.model, self.method = table, observation, model, method

    def runs(self, plan: Plan, sizes: Mapping[str, int] | None = None) -> bool:
        """Returns whether the model accepts arguments of the given sizes, by default those an export would use."""
        try:
            arguments = build_arguments(plan, self.observation, choose_sizes(plan) if sizes is None else sizes)
        except ExportkitError:
            return False
        return self._outputs(arguments) is not None

    def confirm_batch(self, plan: Plan) -> Plan:
        """Returns the plan with the batch axes that repeated rows show; a guess they do not confirm becomes static."""
        varying = plan.with_role("batch")
        if varying is not None and len(known(varying.seen)) > 1:
            return plan
        for size in self._batch_candidates():
            axes = next((choice for choice in self._constant_axes(size) if self._rows_repeat(choice)), None)
            if axes is not None:
                evidence = f"always {size}; with rows repeated, the outputs repeated too"
                seen = tuple(size for _ in self.observation.calls)
                plan = _without_guess(plan, self.table)
                return name_variables(plan.with_variable(Variable("confirmed_batch", "batch", seen, evidence), axes))
        text = "no axis was found to be the batch: no input's rows could be repeated. The batch stays static."
        return name_variables(_without_guess(plan, self.table)).with_findings([Finding("batch", "", text)])

    def add_relations(self, plan: Plan) -> Plan:
        """Returns a plan with relations of weaker evidence, if the model accepts that one and not this one."""
        bolder = infer_plan(self.table, plan.constants, distinct=2)
        batch = plan.with_role("batch")
        if batch is not None and len(known(batch.seen)) == 1:
            bolder = _without_guess(bolder, self.table).with_variable(batch, plan.axes_of(batch.name))
        for candidate in (self._tied(plan), bolder, self._tied(bolder)):
            if self.runs(candidate):
                return candidate
        text = "the model refuses sizes other than those recorded; the relation between its inputs was not found."
        return plan.with_findings([Finding("sizes", "", text)])

    def _tied(self, plan: Plan) -> Plan:
        """The plan in which inputs given in few calls take the variables that had their sizes in those calls."""
        found: dict[AxisKey, Expression] = {}
        for leaf, axis, sizes in self.table.axes():
            if None in leaf.shapes and plan.by_path[leaf.path].sizes[axis].is_static:
                same = [v for v in plan.variables if _agrees(v, sizes)]
                found |= {(leaf.path, axis): Expression.of(same[0].name)} if same else {}
        return plan.with_sizes(found)

    def pull_apart(self, plan: Plan) -> Plan:
        """Returns the plan with axes of different inputs separated, where the model accepts different sizes.

        Relations that the model does not need are given up too, but for those of a cache's length.
        """
        for number, size in enumerate(_doubtful(plan)):
            axes = [(leaf.path, i) for leaf in plan.leaves for i, other in enumerate(leaf.sizes) if other == size]
            name, seen = f"unrelated_{number}", self.table.sizes_of(axes[0])
            evidence = f"sizes {', '.join(map(str, seen))}; accepted apart from {size}"
            separate = plan.with_variable(Variable(name, "other", seen, evidence), axes)
            if all(self._accepts_apart(separate, other, name) for other in size.variables()):
                plan = separate
        for variable in plan.variables:
            if variable.role == "batch" and len(known(variable.seen)) == 1:
                continue  # confirmed by repeated rows: inputs that some calls ignore belong to it all the same
            for number, unit in enumerate(self._units(plan, variable)):
                name = f"{variable.name}_part_{number}"
                evidence = f"{variable.evidence}; accepted apart from {variable.name}"
                part = replace(variable, name=name, role="other", evidence=evidence)
                separate = plan.with_variable(part, unit)
                if self._accepts_apart(separate, variable.name, name):
                    plan = separate
        return plan

    def _accepts_apart(self, plan: Plan, first: str, second: str) -> bool:
        try:
            sizes = choose_sizes(plan)
        except ExportkitError:
            return False
        swapped = {**sizes, first: sizes[second], second: sizes[first]}
        return self.runs(plan, sizes) and self.runs(plan, swapped)

    def _units(self, plan: Plan, variable: Variable) -> Iterator[list[AxisKey]]:
        """Yields the axes of a variable that could be a size of their own: those of one input at one position.

        Left together are the leaves of one argument, the first input's axes, and integer inputs of equal shape
        (token ids and their mask), which mean the same positions.
        """
        axes = plan.axes_of(variable.name)
        units: dict[tuple[str, int], list[AxisKey]] = {}
        for path, axis in axes:
            units.setdefault((plan.by_path[path].argument, axis), []).append((path, axis))
        leaves = {leaf.path: leaf for leaf in self.table.leaves}
        for unit in list(units.values())[1:]:
            rest = [key for key in axes if key not in unit]
            if not any(_twins(leaves[a], leaves[b]) and i == j for a, i in unit for b, j in rest):
                yield unit

    def _batch_candidates(self) -> list[int]:
        """Sizes that never change on a leading axis, or on any axis, the most frequent first."""
        leading = Counter(next(iter(known(s))) for _, axis, s in self.table.axes() if axis == 0 and len(known(s)) == 1)
        return [size for size, _ in leading.most_common() if size > 0]

    def _constant_axes(self, size: int) -> Iterator[list[AxisKey]]:
        """Yields choices of one axis for each leaf that always has that size: the first ones, then others.

        The leaves of one argument take the same choice, as the layers of a cache do.
        """
        found: dict[str, dict[str, list[int]]] = {}
        for leaf, axis, sizes in self.table.axes():
            if known(sizes) == {size} and leaf.growing != axis:
                found.setdefault(leaf.argument, {}).setdefault(leaf.path, []).append(axis)
        turns = [range(max(len(axes) for axes in leaves.values())) for leaves in found.values()]
        for turn in itertools.islice(itertools.product(*turns), _MOST_CHOICES if found else 0):
            yield [
                (path, axes[min(which, len(axes) - 1)])
                for which, leaves in zip(turn, found.values(), strict=True)
                for path, axes in leaves.items()
            ]

    def _rows_repeat(self, axes: list[AxisKey]) -> bool:
        """Returns whether doubling the given axes doubles outputs along one axis, both halves as before.

        Asked of the call with the most tensors, and of the first call where that is another one.
        """
        counts = [len(call.tensors()) for call in self.observation.calls]
        calls = dict.fromkeys([counts.index(max(counts)), 0])
        return all(self._rows_repeat_in(index, dict(axes)) for index in calls)

    def _rows_repeat_in(self, index: int, axes: Mapping[str, int]) -> bool:
        recorded = recorded_call(self.observation, index)
        doubled = {name: _doubled(name, tree, axes) for name, tree in recorded.trees.items()}
        before = self._outputs(recorded)
        after = self._outputs(Arguments(doubled, self.observation))
        if before is None or after is None or before.keys() != after.keys():
            return False
        same = [_repeats(before[path], after[path]) for path in before]
        return None not in same and True in same

    def _outputs(self, arguments: Arguments) -> dict[str, torch.Tensor] | None:
        try:
            return flatten(run_eager(self.model, self.method, arguments)).tensors()
        except Exception:
            return None


def _doubled(name: str, tree: Tree, axes: Mapping[str, int]) -> Tree:
    tensors = {p: (t, axes[full]) for p, t in tree.tensors().items() if (full := join(name, p)) in axes}
    return tree.with_leaves({path: torch.cat([tensor, tensor], axis) for path, (tensor, axis) in tensors.items()})


def _repeats(before: torch.Tensor, after: torch.Tensor) -> bool | None:
    """True if ``after`` is ``before`` twice along one axis, False if it is the same, None if it is neither."""
    if before.shape == after.shape:
        return False if close(before, after) else None
    longer = [i for i, (a, b) in enumerate(zip(before.shape, after.shape, strict=False)) if a != b]
    if before.ndim != after.ndim or len(longer) != 1 or after.shape[longer[0]] != 2 * before.shape[longer[0]]:
        return None
    return True if all(close(before, half) for half in after.chunk(2, dim=longer[0])) else None


def _doubtful(plan: Plan) -> list[Expression]:
    """Expressions that may fit by accident: those without a cache's length in them."""
    past = {variable.name for variable in plan.variables if variable.role == "past"}
    sizes = dict.fromkeys(size for leaf in plan.leaves for size in leaf.sizes)
    return [size for size in sizes if not size.is_static and size.variable is None and not size.variables() & past]


def _agrees(variable: Variable, sizes: Sizes) -> bool:
    return all(size is None or size == other for size, other in zip(sizes, variable.seen, strict=True))


def _twins(a: Leaf, b: Leaf) -> bool:
    return a.is_integer and b.is_integer and a.shapes == b.shapes


def _without_guess(plan: Plan, table: CallTable) -> Plan:
    """The plan with a batch that was guessed from sizes that never changed made static again."""
    guess = plan.with_role("batch")
    if guess is None or len(known(guess.seen)) > 1:
        return plan
    static = {leaf.path: next(shape for shape in leaf.shapes if shape is not None) for leaf in table.leaves}
    return plan.with_sizes({(p, axis): Expression.of(static[p][axis]) for p, axis in plan.axes_of(guess.name)})
