"""Audits a traced program: its domain against the plan, and what users should know about it.

A domain that is narrower than the plan is a finding. It is an error if it leaves out a recorded call, or sizes that a
user asked for.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from exportkit._torch_compat.graph import draws_numbers, operator_name, schema_of
from exportkit._torch_compat.size_arithmetic import is_of_slices
from exportkit.arguments.build import build_call
from exportkit.calls.call import Call
from exportkit.errors import ExportError, UnregisteredClassError
from exportkit.overrides import replaced_classes
from exportkit.plan.conditions import SizeCondition, exactly
from exportkit.plan.leaves import Finding
from exportkit.plan.sizes import settled, sizes_between, solve_sizes, unseen_sizes
from exportkit.plan.small_sizes import at_pattern, small
from exportkit.probing.effects import changed_state
from exportkit.probing.missing import absent_patterns
from exportkit.programs.call_check import SMALLEST
from exportkit.programs.domain import Domain
from exportkit.programs.guards import TracedSizes
from exportkit.programs.kept_state import STATE
from exportkit.programs.model_lines import ModelLine, line_of_node
from exportkit.programs.patterns import sizes_of_calls, with_recorded_patterns, without_harmless
from exportkit.programs.program import TracedProgram
from exportkit.programs.program_probe import ProgramProbe
from exportkit.running.eager import replaced_buffer
from exportkit.running.program import tensor_placeholders
from exportkit.trees import check_opened, first_name

# The largest limit beyond which the model itself is run.
_ASKED = 2048
_OVERWRITES = {"aten::copy_", "aten::fill_", "aten::zero_"}  # they read nothing of what they write to
_TRIED_IN_RANGE = 64  # sizes of a range that a user asked for


@dataclass(frozen=True)
class Audit:
    """What the audit of a program found.

    Attributes:
        domain: Where the program may be used; of sizes of 0 and 1 it has those that were recorded.
        findings: Sizes that it does not serve.
        refused: How many combinations of sizes the plan allows and the model accepts, but not the program.
        by_model: Whether a line of the model, or how long a slice of it is, is the reason for some of them.
        by_loop: Whether the line of a loop is the reason for some of them.
        between: Whether only multiples of a number are served, where the model accepts other sizes.
        crossings: Sizes that break conditions which change nothing.
    """

    domain: Domain
    findings: tuple[Finding, ...]
    refused: int
    by_model: bool
    by_loop: bool
    between: bool
    crossings: tuple[Mapping[str, int], ...]


def audit_sizes(traced: TracedProgram) -> Audit:
    """Returns the domain of a program, and what it leaves out of what the plan promises.

    Raises:
        ExportError: if a recorded call is outside, or sizes that a user asked for.
    """
    sizes, probe = TracedSizes(traced), ProgramProbe(traced)
    domain = replace(traced.domain, conditions=sizes.conditions(), returned=sizes.named(traced.numbers))
    domain = with_recorded_patterns(traced, domain, probe)
    domain, crossings = without_harmless(traced, domain, probe, sizes)
    for call in traced.observation.calls:
        domain = _with_recorded(traced, domain, call, probe, sizes.fixed())
    limits: dict[str, Finding] = {}
    refused, by_model, by_loop = 0, False, False
    for label, promised in _promises(traced, domain):
        broken = _broken(traced, domain, promised)
        if not broken:
            continue
        why = _why_refused(traced, promised)
        refused += not why
        by_model |= not why and any(condition.own or is_of_slices(condition.place) for condition in broken)
        by_loop |= not why and any(map(_is_of_loop, broken))
        for condition in broken:
            if condition.own or condition.bounds() is not None or len(broken) == 1:
                more = f"; {why or 'the model accepts more'} ({label})"
                limits.setdefault(condition.text, _limit(condition, more))
    between = False
    for item in sizes_between(traced.plan, traced.sizes):
        broken = [condition for condition in domain.conditions if not condition.holds(item.sizes)]
        if broken and not _why_refused(traced, item.sizes):
            between, refused = True, refused + 1
            limits.setdefault(broken[0].text, _limit(broken[0], f"; the model accepts more ({item.label})"))
    for condition in domain.conditions:
        if condition.own:
            limits.setdefault(condition.text, _limit(condition, ""))
    for guard in sizes.unenforceable():
        place = ModelLine(guard.file, guard.line)
        text = f"a decision at {guard.file}:{guard.line} ({place.code}) depends on values; the graph keeps it."
        limits.setdefault(text, Finding("limit", f"{guard.file}:{guard.line}", text))
    _require_ranges(traced, domain)
    return Audit(domain, tuple(limits.values()), refused, by_model, by_loop, between, tuple(crossings))


def _with_recorded(
    traced: TracedProgram, domain: Domain, call: Call, probe: ProgramProbe, fixed: Collection[str]
) -> Domain:
    """The domain with a recorded call inside: if it breaks a condition, its sizes are admitted if nothing differs."""
    at = solve_sizes(traced.plan, call.shapes())
    waived = next((pattern.waived for pattern in domain.patterns if pattern.sizes == small(at)), ())
    broken = [c for c in domain.conditions if c.text not in waived and not c.holds(at)]
    if not broken:
        return domain
    difference = probe.difference_in(call)
    if not difference and any(condition.own for condition in broken) and not probe.is_right_at_other_scales(at):
        difference = "another result for values of another scale"
    if difference or any(condition.text in fixed for condition in broken):
        error = _narrower(traced, broken[0], at, f"recorded call {call.index}", difference)
        if not _fixes_number(broken[0]):
            sizes = enumerate(sizes_of_calls(traced))
            breaking = frozenset(number for number, item in sizes if not broken[0].holds(item))
            error.sides = broken[0].text, breaking
        raise error
    admitted = {c.text: replace(c, text=f"{c.text} or ({exactly(at)})") for c in broken}
    conditions = [admitted.get(condition.text, condition) for condition in domain.conditions]
    patterns = []
    for pattern in domain.patterns:
        texts = [admitted[text].text if text in admitted else text for text in pattern.waived]
        patterns.append(replace(pattern, waived=tuple(texts)))
    return replace(domain, conditions=tuple(conditions), patterns=tuple(patterns))


def _broken(traced: TracedProgram, domain: Domain, sizes: Mapping[str, int]) -> list[SizeCondition]:
    """The conditions that sizes break, apart from those that they break only because some of them are 0 or 1."""
    broken = domain.broken(sizes)
    pattern = small(sizes)
    if broken and pattern:
        at = at_pattern(traced.plan, traced.sizes, pattern)
        broken = [condition for condition in broken if condition.holds(at)]
    return broken


def _promises(traced: TracedProgram, domain: Domain) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Yields sizes that the plan allows: unseen ones, and those beyond the limits of a variable."""
    plan = traced.plan
    for item in unseen_sizes(plan, traced.sizes):
        yield item.label, item.sizes
    for condition in domain.conditions:
        name, _, most = condition.bounds() or ("", None, None)
        if most is not None and most < _ASKED:
            beyond = settled(plan, {**traced.sizes, name: most + 1 + SMALLEST})
            if all(plan.variable(v).maximum is None or n <= (plan.variable(v).maximum or 0) for v, n in beyond.items()):
                yield f"{name} {beyond[name]}", beyond


def _why_refused(traced: TracedProgram, sizes: Mapping[str, int]) -> str:
    """Why the model itself does not run at these sizes unchanged; an empty string if it does."""
    try:
        call = build_call(traced.plan, traced.observation, sizes)
        buffer = replaced_buffer(traced.model, traced.method, call)
    except Exception:  # whatever the model raises for these sizes
        return "the model itself raises for others"
    return f"the model itself makes another {buffer} for others" if buffer else ""


def _require_ranges(traced: TracedProgram, domain: Domain) -> None:
    """Raises ExportError if the program does not serve the whole range that a user asked for with `Plan.range`."""
    for variable in traced.plan.variables:
        if not variable.required or (variable.maximum is None and variable.minimum < SMALLEST):
            continue
        least = max(variable.minimum, SMALLEST)
        most = least if variable.maximum is None else variable.maximum
        step = max((most - least) // _TRIED_IN_RANGE, 1)
        for size in (*range(least, most, step), most):
            sizes = settled(traced.plan, {**traced.sizes, variable.name: size})
            broken = domain.broken(sizes)
            if broken and not _why_refused(traced, sizes):
                raise _narrower(traced, broken[0], sizes, f"the range of {variable.name}", "")


def _narrower(
    traced: TracedProgram, condition: SizeCondition, sizes: Mapping[str, int], label: str, difference: str
) -> ExportError:
    place = _place(condition)
    error = ExportError(
        f"The exported graph serves less than the plan promises: {condition.text} only.",
        where=str(place) if place else None,
        expected=f"{', '.join(f'{name} {size}' for name, size in sizes.items())} too, as in {label}",
        got=f"{condition.got(sizes)}{f'; {difference}' if difference else ''}",
        hint=_hint(traced, condition),
    )
    error.request = traced.request()
    return error


def _place(condition: SizeCondition) -> ModelLine | None:
    """The line of the model that asked for a condition; None if it is not the model's."""
    file, _, line = condition.place.rpartition(":")
    return ModelLine(file, int(line)) if file and condition.own else None


def _is_of_loop(condition: SizeCondition) -> bool:
    place = _place(condition)
    return place is not None and place.code.startswith(("for ", "while "))


def _fixes_number(condition: SizeCondition) -> bool:
    """Whether a condition is about the turns of a loop, or fixes a number: each length would be another program."""
    match condition.tree:
        case ast.Compare(ast.BinOp(_, ast.Mod()), [ast.Eq()], [ast.Constant(0)]):
            is_number = False
        case ast.Compare(_, [ast.Eq()], _):
            is_number = _place(condition) is None
        case _:
            is_number = False
    return _is_of_loop(condition) or is_number


def _limit(condition: SizeCondition, more: str) -> Finding:
    place = f" ({condition.place})" if condition.own and condition.place else ""
    return Finding("limit", condition.text, f"the graph serves {condition.text} only{place}{more}.")


def _hint(traced: TracedProgram, condition: SizeCondition) -> str:
    bounds = condition.bounds()
    if bounds is None:
        return "change this line so that it does not decide by these sizes."
    known = {size for size in traced.plan.variable(bounds[0]).seen if size is not None}
    if len(known) == 1:
        return f'change this line, or accept it: export(model, observer.plan().static("{bounds[0]}")).'
    return f'change this line, or promise less: export(model, observer.plan().range("{bounds[0]}", ...)).'


def findings_of(traced: TracedProgram) -> list[Finding]:
    """Returns the findings on rewrites in force, on missing inputs, and on the mode and the state of the model."""
    findings = rule_findings(traced)
    recorded = absent_patterns(traced.plan, traced.observation)
    for pattern, reason in traced.absences.refused.items():
        names = ", ".join(sorted(pattern))
        calls = ", ".join(map(str, recorded[pattern]))
        text = f"calls {calls} leave out {names}, and no default stands for that ({reason}); the graph refuses them"
        is_stored = min(recorded[pattern]) < len(traced.observation.calls)
        text += "." if is_stored else "; store more calls to serve them (store_n_calls)."
        findings.append(Finding("missing input", names, text))
    findings += _refused_later(traced)
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
    modes = {bool(call.autocast): call for call in traced.observation.calls}
    if len(modes) > 1:
        text = (
            f"call {modes[True].index} was made under torch.autocast, and call {modes[False].index} was not; the graph "
            "computes as under it. Record each in an observer of its own."
        )
        findings.append(Finding("autocast", "", text))
    changed = dict.fromkeys(
        name for call in traced.observation.calls[:2] for name in changed_state(traced.model, traced.method, call)
    )
    if changed:
        text = (
            f"the model changes {', '.join(changed)} when it is called; a graph has no memory, so it does not. If the "
            "result depends on it, take it as an argument and return the new value."
        )
        findings.append(Finding("state", ", ".join(changed), text))
    if traced.stateful:
        text = f"the model keeps its state on its modules; the graph takes it as {STATE} and returns it."
        findings.append(Finding("module state", STATE, text))
    elif traced.begins_anew:
        text = "the model keeps a state on its modules; as in the recorded calls, each call of the graph begins anew."
        findings.append(Finding("module state", "", text))
    return findings


def _refused_later(traced: TracedProgram) -> list[Finding]:
    """Findings on constants of calls that were not stored, and that the graph refuses."""
    counts: dict[tuple[str, str], int] = {}
    for seen in traced.observation.further:
        for path, value in traced.domain.values.refused(traced.observation.constants_of(seen)).items():
            counts[path, repr(value)] = counts.get((path, repr(value)), 0) + seen.count
    return [
        Finding(
            "refused call",
            path,
            f"{'1 call' if count == 1 else f'{count} calls'} that {'was' if count == 1 else 'were'} not stored gave "
            f"{path}={value}, which the graph refuses; store more calls to serve it (store_n_calls).",
        )
        for (path, value), count in counts.items()
    ]


def rule_findings(traced: TracedProgram) -> list[Finding]:
    """Returns the findings on rewrites that were in force, and on classes that were replaced."""
    swaps = [
        f"{original.__name__} replaced by {replacement.__name__} ({count} module{'s' if count > 1 else ''})"
        for original, replacement, count in replaced_classes(traced.model)
    ]
    rewrites = ", ".join((*traced.rules, *swaps))
    return [Finding("exported with", rewrites, f"exported with: {rewrites}.")] if rewrites else []


def audit_effects(traced: TracedProgram) -> list[Finding]:
    """Returns the findings on random numbers, inputs without effect, outputs that are inputs or are out of reach.

    Raises:
        ExportError: if the model computes its result from buffers that it changes.
        UnregisteredClassError: if the model returns nothing but an object that cannot be opened.
    """
    if kept := _buffers_kept_between_calls(traced.program):
        raise ExportError(
            "The model keeps a state in its buffers: it changes them, and its result depends on what the call before "
            "left in them.",
            where=", ".join(kept),
            expected="a result that depends on the inputs alone",
            hint="take the state as an input and return the new one, as models do with caches.",
        )
    inputs = dict(zip(tensor_placeholders(traced.program), traced.input_paths, strict=True))
    nodes = list(traced.program.graph.nodes)
    unused = {node.name for node in nodes if node.op == "placeholder" and not node.users}
    findings = []
    ignored = ", ".join(path for name, path in inputs.items() if name in unused)
    if ignored:
        text = f"the model does not use these inputs, so the graph does not take them: {ignored}."
        findings.append(Finding("ignored input", ignored, text))
    drawn = {operator_name(node.target): line_of_node(node) for node in nodes if node.users and draws_numbers(node)}
    if drawn:
        names = ", ".join(f"{name} in {place.owner}" if place else name for name, place in drawn.items())
        text = (
            f"the model draws random numbers ({names}): results differ from run to run, in the model and in the graph."
        )
        findings.append(Finding("random numbers", ", ".join(drawn), text))
    # outputs that share memory with an input in the model do not in the graph
    (returned,) = next(node for node in nodes if node.op == "output").args
    paths = iter(traced.output_paths)
    for node, spec in zip(returned, traced.program.graph_signature.output_specs, strict=True):
        if spec.kind.name != "USER_OUTPUT" or not hasattr(node, "op"):
            continue
        path = next(paths)
        source, is_view = _source(node)
        if source.name in inputs and first_name(inputs[source.name]) not in {*traced.observation.written, STATE}:
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


def _buffers_kept_between_calls(program: torch.export.ExportedProgram) -> list[str]:
    """Names of the buffers that a program writes, after it has computed some of its result from the old values."""
    names = program.graph_signature.inputs_to_buffers
    results = {spec.arg.name for spec in program.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"}
    old: dict[str, frozenset[str]] = {}  # by node: the buffers that its value is computed from, as the call found them
    written, used = set[str](), set[str]()
    for node in program.graph.nodes:
        old[node.name] = frozenset({names[node.name]}) if node.name in names else frozenset()
        if node.op != "call_function":
            continue
        old[node.name] = frozenset().union(*(old[value.name] for value in node.all_input_nodes))
        schema = schema_of(node.target)
        if schema is None or not schema.is_mutable or not isinstance(node.args[0], torch.fx.Node):
            continue
        base, _ = _source(node.args[0])
        if node.args[0] is base and schema.name in _OVERWRITES:
            others = [value for value in node.all_input_nodes if value is not base]
            old[node.name] = old[base.name] = frozenset().union(*(old[value.name] for value in others))
        else:
            old[base.name] |= old[node.name]
        written |= {names[base.name]} if base.name in names else set()
    for name in results & old.keys():
        used |= old[name]
    return sorted(written & used)


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
