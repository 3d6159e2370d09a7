"""Audits a traced program: its sizes against the plan, its domain, and what users should know about it.

A program that serves less than the plan promises is an error: it must allow the recorded calls, sizes that were never
run, and sizes beyond a limit, unless the model itself raises for them. Lower limits do not count: torch.export assumes
sizes of 2 and more, and a graph serves smaller ones all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from exportkit._torch_compat.graph import schema_of
from exportkit._torch_compat.symbolic_shapes import ShapeGuard, as_python, input_axes, shape_guards
from exportkit.arguments.build import build_call
from exportkit.errors import ExportError, UnregisteredClassError
from exportkit.overrides import replaced_classes
from exportkit.plan.leaves import Finding
from exportkit.plan.plan import Plan
from exportkit.plan.sizes import solve_sizes, unseen_sizes
from exportkit.probing.effects import changed_state
from exportkit.probing.missing import absent_patterns
from exportkit.probing.simplify import first_step
from exportkit.programs.domain import Domain, SizeCondition
from exportkit.programs.failure import Place, is_model_code
from exportkit.programs.program import TracedProgram
from exportkit.programs.subject import STATE
from exportkit.running.eager import replaced_buffer
from exportkit.running.program import tensor_placeholders
from exportkit.trees import check_opened

_SYMBOL = re.compile(r"\b[su]\d+\b")
# A limit that means none to torch; and the largest limit beyond which the model itself is run.
_UNLIMITED, _ASKED = 2**31, 2048
_BRANCH = "fixed branch"
_REFUSES = "the model itself raises for more"
# The smallest size that torch.export assumes.
_SMALLEST = 2

Axis = tuple[str, int]


@dataclass(frozen=True)
class _Promise:
    """Sizes that the plan allows, and the shapes of all inputs at these sizes."""

    label: str
    sizes: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    recorded: bool


@dataclass(frozen=True)
class _Narrow:
    """A size that a program refuses: its axis, what the program takes, and the line of the model that limits it."""

    axis: Axis
    takes: str
    place: Place | None
    related: bool = False


class _Program:
    """The axes of a program's inputs as torch traced them: ints and expressions in symbols."""

    def __init__(self, traced: TracedProgram) -> None:
        self.traced = traced
        self.guards = shape_guards(traced.program)
        self.axes: dict[Axis, Any] = {}
        self.homes: dict[Any, Axis] = {}  # the first axis with the size of each symbol
        sizes = input_axes(traced.program)
        for node, path in zip(tensor_placeholders(traced.program), traced.input_paths, strict=True):
            for axis, size in enumerate(sizes[node]):
                self.axes[path, axis] = size
                if getattr(size, "is_Symbol", False):
                    self.homes.setdefault(size, (path, axis))

    def limit(self, size: Any) -> int | None:
        """The largest value of a traced size, or None."""
        allowed = self.traced.program.range_constraints.get(size)
        upper: Any = None if allowed is None else allowed.upper
        return int(upper) if getattr(upper, "is_Integer", False) and upper < _UNLIMITED else None

    def symbols(self, promise: _Promise) -> dict[Any, Any]:
        """The value of each symbol, as an integer of sympy."""
        import sympy  # 0.4 s; loaded by then, as it is what torch traces with

        return {symbol: sympy.Integer(promise.shapes[path][axis]) for symbol, (path, axis) in self.homes.items()}

    def refusals(self, promise: _Promise) -> Iterator[_Narrow]:
        """Yields the sizes of a promise that the program refuses."""
        values = self.symbols(promise)
        for axis, size in self.axes.items():
            wanted = promise.shapes[axis[0]][axis[1]]
            if isinstance(size, int):
                if size != wanted:
                    yield _Narrow(axis, f"only {size}", None)
                continue
            value = _evaluated(size, values)
            limit = self.limit(size)
            if getattr(value, "is_Integer", False) and value != wanted:
                yield _Narrow(axis, f"only {self.named(size)}{self._at(size)}", self._place(size), related=True)
            elif limit is not None and wanted > limit and not self._is_lower_limit(size, wanted - limit, values):
                yield _Narrow(axis, f"at most {limit}", self._place(size))

    def _is_lower_limit(self, size: Any, excess: int, values: Mapping[Any, Any]) -> bool:
        """Whether a limit only says that the rest of another size is 2 or more, as torch assumes of all sizes.

        Then only torch's own code asked for it, and sizes beyond it leave 1 or 0.
        """
        broken = [
            guard.file
            for guard in self.guards
            if guard.left.free_symbols & size.free_symbols and _is_broken(guard, values)
        ]
        return bool(broken) and excess <= _SMALLEST and not any(map(is_model_code, broken))

    def branches(self, promise: _Promise) -> Iterator[ShapeGuard]:
        """Yields decisions by size in the model's own code that come out differently for a promise."""
        values = self.symbols(promise)
        for guard in self.guards:
            if is_model_code(guard.file) and _is_broken(guard, values):
                yield guard

    def named(self, expression: Any) -> str:
        """The expression in the names of the plan."""
        text = str(expression)
        if getattr(expression, "is_Relational", False):
            text = f"{expression.lhs} {expression.rel_op} {expression.rhs}"
        names = {}
        for symbol, (path, axis) in self.homes.items():
            size = self.traced.plan.by_path[path].sizes[axis]
            names[str(symbol)] = f"{path} axis {axis}" if size.is_static else str(size)
        alone = _SYMBOL.fullmatch(text) is not None
        return _SYMBOL.sub(lambda m: n if alone or " " not in (n := names.get(m[0], m[0])) else f"({n})", text)

    def _at(self, size: Any) -> str:
        home = self.homes.get(size)
        return "" if home is None else f", the size of axis {home[1]} of {home[0]}"

    def _place(self, size: Any) -> Place | None:
        """The first line that asked something about a traced size, one of the model's own if there is any."""
        guards = [guard for guard in self.guards if guard.file and guard.asked.free_symbols & size.free_symbols]
        own = [guard for guard in guards if is_model_code(guard.file)]
        return Place(own[0].file, own[0].line) if own else None


def _evaluated(expression: Any, values: Mapping[Any, Any]) -> Any:
    """The expression for these sizes; None where it has no value, as it divides by one of them that is 0."""
    try:
        return expression.xreplace(values)
    except ArithmeticError:
        return None


def _is_broken(guard: ShapeGuard, values: Mapping[Any, Any]) -> bool:
    """Whether these sizes contradict a guard; a relation that stays open, for lack of a size, does not."""
    return bool(_evaluated(guard.left, values) == False)  # noqa: E712  # sympy's false equals False


@dataclass(frozen=True)
class Audit:
    """What the audit of a program found.

    Attributes:
        findings: Limits, and decisions by size that the program keeps.
        limits: The limits as conditions over the variables of the plan.
    """

    findings: tuple[Finding, ...]
    limits: tuple[SizeCondition, ...]


def domain_of(traced: TracedProgram) -> Domain:
    """Returns the domain of a program; of the guards of its trace, those of the model's own code come first."""
    program = _Program(traced)
    found: dict[str, SizeCondition] = {}
    for guard in sorted(program.guards, key=lambda guard: not is_model_code(guard.file)):
        if guard.left != True:  # noqa: E712  # sympy's true equals True, and a relation has no truth value
            text, file = program.named(guard.left), guard.file.rpartition("site-packages/")[2]
            place = f"{file}:{guard.line}" if file else ""
            found.setdefault(text, SizeCondition(text, place, is_model_code(guard.file)))
    domain = Domain.of_plan(traced.plan, traced.limits, tuple(found.values()), traced.absences.allowed)
    returned = {}
    for path, number in traced.numbers.items():
        names = {s: str(traced.plan.by_path[p].sizes[axis]) for s, (p, axis) in program.homes.items()}
        returned[path] = as_python(number, names)
    return replace(domain, values=traced.values, returned=returned)


def audit_sizes(traced: TracedProgram) -> Audit:
    """Returns the limits of a program on sizes, and the decisions by size that it keeps.

    Args:
        traced: The program.

    Raises:
        ExportError: if the program allows less than the plan.
    """
    program = _Program(traced)
    known: dict[str, str] = {}
    limits: dict[str, tuple[Finding, SizeCondition]] = {}
    branches: dict[tuple[str, int], Finding] = {}
    for promise in _promises(program):
        refusal = next(program.refusals(promise), None)
        differing = list(program.branches(promise))
        if refusal is None and not differing:
            continue
        why = "" if promise.recorded else _why_refused(traced, promise, known)
        if refusal is not None:
            if not why:
                raise _narrower(refusal, promise, program)
            finding, condition = _model_limit(refusal, promise, program, why)
            limits.setdefault(finding.where, (finding, condition))
            continue
        if why == _REFUSES:
            continue
        for guard in differing:
            branches.setdefault((guard.file, guard.line), _branch(guard, promise, program))
    found = limits.values()
    findings = [finding for finding, _ in found] + [*branches.values()]
    conditions = [condition for _, condition in found]
    for (name, _), limit in _limits(program):
        if limit >= _ASKED:
            text = f"{name} is limited: the graph takes at most {limit} in an axis that depends on it."
            findings.append(Finding("limit", name, text))
            conditions.append(SizeCondition(f"{name} <= {limit}"))
    return Audit(tuple(findings), tuple(conditions))


def fixed_branches(plan: Plan) -> list[Finding]:
    """Returns the findings on decisions by size that a program keeps although other sizes decide otherwise."""
    return [finding for finding in plan.findings if finding.kind == _BRANCH]


def _promises(program: _Program) -> Iterator[_Promise]:
    plan = program.traced.plan
    for call in program.traced.observation.calls:
        sizes = solve_sizes(plan, call.shapes())
        yield _Promise(f"recorded call {call.index}", sizes, plan.shapes(sizes), True)
    for item in unseen_sizes(plan, program.traced.sizes):
        yield _Promise(item.label, item.sizes, plan.shapes(item.sizes), False)
    for (name, larger), limit in _limits(program):  # sizes larger than what the program takes
        if limit < _ASKED:
            yield _Promise(f"{name} {larger[name]}", larger, plan.shapes(larger), False)


def _limits(program: _Program) -> Iterator[tuple[tuple[str, dict[str, int]], int]]:
    """Yields a variable with sizes in which it is too large for the program, and the limit of its axis."""
    plan = program.traced.plan
    done = set()
    for (path, axis), traced in program.axes.items():
        limit = None if isinstance(traced, int) else program.limit(traced)
        size = plan.by_path[path].sizes[axis]
        if limit is None or size.is_static or not size.is_linear:
            continue
        name, factor = size.terms[-1]
        sizes = dict(program.traced.sizes)
        if plan.variable(name).filled_length(sizes) is not None:  # the plan promises this length or 0, and nothing else
            continue
        sizes[name] += max(-(-(limit + 1 + _SMALLEST - size.evaluate(sizes)) // factor), 0)
        largest = plan.variable(name).maximum
        if (name, limit) not in done and (largest is None or sizes[name] <= largest):
            done.add((name, limit))
            yield (name, sizes), limit


def _why_refused(traced: TracedProgram, promise: _Promise, known: dict[str, str]) -> str:
    """Why the model itself does not run at these sizes unchanged; an empty string if it does."""
    if promise.label not in known:
        try:
            call = build_call(traced.plan, traced.observation, promise.sizes)
            buffer = replaced_buffer(traced.model, traced.method, call)
            known[promise.label] = f"the model itself makes another {buffer} for more" if buffer else ""
        except Exception:  # whatever the model raises for these sizes
            known[promise.label] = _REFUSES
    return known[promise.label]


def _narrower(refusal: _Narrow, promise: _Promise, program: _Program) -> ExportError:
    path, axis = refusal.axis
    size = program.traced.plan.by_path[path].sizes[axis]
    where = f"axis {axis} of {path}"
    error = ExportError(
        f"The exported graph serves less than the plan promises: {where} ({size}) is limited.",
        where=str(refusal.place or where),
        expected=f"{promise.shapes[path][axis]} too, as in {promise.label}, which the model itself accepts",
        got=f"the graph takes {refusal.takes}",
        hint=_hint(size.variable, refusal.related, program),
    )
    error.request = program.traced.request()
    return error


def _hint(variable: str | None, related: bool, program: _Program) -> str:
    if related or variable is None:
        return "change this line so that it does not decide by how these sizes are related."
    known = {size for size in program.traced.plan.variable(variable).seen if size is not None}
    if len(known) == 1:
        return f'change this line, or accept it: export(model, observer.plan().static("{variable}")).'
    return f'change this line, or promise less: export(model, observer.plan().range("{variable}", ...)).'


def _model_limit(refusal: _Narrow, promise: _Promise, program: _Program, why: str) -> tuple[Finding, SizeCondition]:
    path, axis = refusal.axis
    size = program.traced.plan.by_path[path].sizes[axis]
    text = f"axis {axis} of {path} ({size}): the graph takes {refusal.takes}; {why} ({promise.label})."
    limit = refusal.takes.removeprefix("at most ")
    condition = f"{size} <= {limit}" if limit != refusal.takes else f"{size} == {refusal.takes.removeprefix('only ')}"
    place = "" if refusal.place is None else f"{refusal.place.file}:{refusal.place.line}"
    return Finding("limit", f"{path} axis {axis}", text), SizeCondition(condition, place, refusal.place is not None)


def _branch(guard: ShapeGuard, promise: _Promise, program: _Program) -> Finding:
    place = Place(guard.file, guard.line)
    text = (
        f"the graph keeps a decision by size at {guard.file}:{guard.line} ({place.code}), taken for "
        f"{program.named(guard.left)}; {promise.label} decides otherwise. verify() shows whether that matters."
    )
    return Finding(_BRANCH, f"{guard.file}:{guard.line}", text)


def findings_of(traced: TracedProgram) -> list[Finding]:
    """Returns the findings on rewrites in force, on missing inputs, and on the mode and the state of the model."""
    findings = rule_findings(traced)
    recorded = absent_patterns(traced.plan, traced.observation)
    for pattern, reason in traced.absences.refused.items():
        names = ", ".join(sorted(pattern))
        calls = ", ".join(map(str, recorded[pattern]))
        text = f"calls {calls} leave out {names}, and no default stands for that ({reason}); the graph refuses them."
        findings.append(Finding("missing input", names, text))
    if traced.model.training:
        text = "the model is in training mode: dropout and batch statistics differ between calls; call model.eval()."
        findings.append(Finding("training mode", "", text))
    inside = [name for name, item in traced.observation.written.items() if traced.wraps and item.place == name]
    if inside:
        text = (
            f"the model changes {', '.join(inside)} in place, so the graph returns the new values too; calling the "
            "OnnxModel writes them back, other runtimes do not."
        )
        findings.append(Finding("changed input", ", ".join(inside), text))
    changed = dict.fromkeys(
        name for call in traced.observation.calls[:2] for name in changed_state(traced.model, traced.method, call)
    )
    if changed:
        text = f"the model changes {', '.join(changed)} when it is called; a graph has no memory, so it does not."
        findings.append(Finding("state", ", ".join(changed), text))
    if traced.stateful:
        text = f"the model keeps its state on its modules; the graph takes it as {STATE} and returns it."
        findings.append(Finding("module state", STATE, text))
    return findings


def rule_findings(traced: TracedProgram) -> list[Finding]:
    """Returns the findings on rewrites that were in force, and on classes that were replaced."""
    swaps = [
        f"{original.__name__} replaced by {replacement.__name__} ({count} module{'s' if count > 1 else ''})"
        for original, replacement, count in replaced_classes(traced.model)
    ]
    rewrites = ", ".join((*traced.rules, *swaps))
    return [Finding("exported with", rewrites, f"exported with: {rewrites}.")] if rewrites else []


def audit_effects(traced: TracedProgram) -> list[Finding]:
    """Returns the findings on inputs without effect, outputs that are inputs, and outputs that are out of reach.

    Args:
        traced: The program.

    Raises:
        UnregisteredClassError: if the model returns nothing but an object that cannot be opened.
    """
    inputs = dict(zip(tensor_placeholders(traced.program), traced.input_paths, strict=True))
    nodes = list(traced.program.graph.nodes)
    unused = {node.name for node in nodes if node.op == "placeholder" and not node.users}
    findings = []
    ignored = ", ".join(path for name, path in inputs.items() if name in unused)
    if ignored:
        text = f"the model does not use these inputs, so the graph does not take them: {ignored}."
        findings.append(Finding("ignored input", ignored, text))
    # outputs that share memory with an input in the model do not in the graph
    (returned,) = next(node for node in nodes if node.op == "output").args
    paths = iter(traced.output_paths)
    for node, spec in zip(returned, traced.program.graph_signature.output_specs, strict=True):
        if spec.kind.name != "USER_OUTPUT" or not hasattr(node, "op"):
            continue
        path = next(paths)
        source, is_view = _source(node)
        if source.name in inputs and first_step(inputs[source.name]) not in traced.observation.written:
            what = "a view of" if is_view else "the same as"
            text = f"output {path or 'of the model'} is {what} input {inputs[source.name]}; the graph returns a copy."
            findings.append(Finding("unchanged output", path, text))
    try:
        check_opened("output", traced.outputs)
    except UnregisteredClassError as error:
        if not traced.outputs.tensors():
            raise
        text = str(error).partition("\n")[0]
        findings.append(Finding("lost output", "output", f"{text} The graph returns the others."))
    return findings


def _source(node: Any) -> tuple[Any, bool]:
    """The node whose memory a value shares, and whether through a view."""
    is_view = False
    while node.op == "call_function" and node.args:
        operator = schema_of(node.target)
        name = "" if operator is None else operator.name
        view = bool(getattr(node.target, "is_view", False))
        if not view and name not in ("aten::clone", "aten::alias", "aten::detach"):
            break
        is_view = is_view or (view and name not in ("aten::alias", "aten::detach"))
        node = node.args[0]
    return node, is_view
