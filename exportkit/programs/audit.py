"""Audits a traced program: its domain against the plan.

A domain that is narrower than the plan is a finding. It is an error if it leaves out a recorded call, or sizes that a
user asked for.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from exportkit._torch_compat.size_arithmetic import is_of_slices
from exportkit.arguments.build import build_call
from exportkit.calls.call import Call
from exportkit.errors import ExportError
from exportkit.plan.conditions import SizeCondition, exactly
from exportkit.plan.leaves import Finding
from exportkit.plan.sizes import settled, sizes_between, unseen_sizes
from exportkit.plan.small_sizes import at_pattern, small
from exportkit.plan.solved_sizes import solve_sizes
from exportkit.plan.tables import sizes_text
from exportkit.programs.call_check import SMALLEST
from exportkit.programs.domain import Domain
from exportkit.programs.guards import TracedSizes
from exportkit.programs.patterns import sizes_of_calls, with_recorded_patterns, without_harmless
from exportkit.programs.program import TracedProgram
from exportkit.programs.program_probe import ProgramProbe
from exportkit.rewrites.model_code import ModelLine
from exportkit.running.eager import replaced_buffer

# The largest limit beyond which the model itself is run.
_ASKED = 2048
_TRIED_IN_RANGE = 64  # sizes of a range that a user asked for


@dataclass(frozen=True)
class Audit:
    """What the audit of a program found.

    Attributes:
        domain: Where the program may be used; of sizes of 0 and 1 it has those that were recorded.
        findings: Sizes that it does not serve.
        refused: How many combinations of sizes the plan allows and the model accepts, but not the program.
        by_model: Whether a line of the model, or how long a slice of it is, is the reason for some of them.
        by_loop: Whether the line of a loop, or a number of iterations that a trace fixed, may be the reason.
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
    # Half of the encoder's states in a cache: the model uses what is cached, and the graph adds the rest.
    following = [SizeCondition(f"{v.name} == 0 or {v.name} == {v.follows}") for v in traced.plan.variables if v.follows]
    domain = replace(domain, conditions=(*domain.conditions, *following))
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
        by_loop |= not why and any(map(_fixes_number, broken))
        for condition in broken:
            if condition.own or condition.bounds() is not None or len(broken) == 1:
                more = f"; {why or 'the model accepts more'} ({label})"
                limits.setdefault(condition.text, _limit(condition, more))
    between = False
    for item in sizes_between(traced.plan, traced.sizes):
        broken = domain.broken(item.sizes)
        if broken and not _why_refused(traced, item.sizes):
            between, refused = True, refused + 1
            by_model |= any(condition.own for condition in broken)
            limits.setdefault(broken[0].text, _limit(broken[0], f"; the model accepts more ({item.label})"))
    for condition in domain.conditions:
        if condition.own:
            limits.setdefault(condition.text, _limit(condition, ""))
    for guard in sizes.unenforceable():
        place = ModelLine(guard.file, guard.line)
        where = f"{guard.file}:{guard.line} ({place.code})"
        text = f"the branch at {where} depends on tensor values; the graph always takes the traced side."
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
        return "the model raises an error at other sizes"
    return f"the model replaces its buffer {buffer} at other sizes" if buffer else ""


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
        expected=f"{sizes_text(sizes)} too, as in {label}",
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
    """Whether a condition is about the line of a loop, or fixes a number: each length would be another program."""
    tree = condition.tree
    match tree:
        case ast.BoolOp(ast.Or(), [first, *others]) if all(map(_is_exact, others)):  # admits the sizes of some calls
            tree = first
    match tree:
        case ast.Compare(ast.BinOp(_, ast.Mod()), [ast.Eq()], [ast.Constant(0)]):
            is_number = False
        case ast.Compare(_, [ast.Eq()], _):
            is_number = _place(condition) is None
        case _:
            is_number = False
    return _is_of_loop(condition) or is_number


def _is_exact(tree: ast.expr) -> bool:
    """Whether a condition says what sizes are, as `exactly` does."""
    match tree:
        case ast.BoolOp(ast.And(), parts):
            return all(map(_is_exact, parts))
        case ast.Compare(ast.Name(), [ast.Eq()], [ast.Constant()]):
            return True
    return False


def _limit(condition: SizeCondition, more: str) -> Finding:
    place = f" ({condition.place})" if condition.own and condition.place else ""
    return Finding("limit", condition.text, f"the graph serves {condition.text} only{place}{more}.")


def _hint(traced: TracedProgram, condition: SizeCondition) -> str:
    bounds = condition.bounds()
    if bounds is None:
        return "change this line so that it does not branch on these sizes."
    known = {size for size in traced.plan.variable(bounds[0]).seen if size is not None}
    if len(known) == 1:
        return f'change this line, or accept it: export(model, observer.plan().static("{bounds[0]}")).'
    return f'change this line, or promise less: export(model, observer.plan().range("{bounds[0]}", ...)).'
