"""Decides whether a difference is caused by sizes, or by inputs that are left out: these then leave the domain.

A runtime may behave differently from torch there; an example is the standard deviation of one element. But the values
of a call may be the cause as well, and then no call is proven. So what leaves the domain has to be right with the same
kind of values at other sizes, and with all inputs given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from exportkit.calls.call import Call
from exportkit.onnx_files.graph import OnnxGraph
from exportkit.plan.leaves import Finding
from exportkit.plan.sizes import settled
from exportkit.plan.small_sizes import sizes_beside, small
from exportkit.probing.missing import absent_patterns
from exportkit.programs.call_check import SmallSizes
from exportkit.proof.calls import calls_beside
from exportkit.proof.report import Row

RowOf = Callable[[Call], Row]


def narrowed(graph: OnnxGraph, recorded: Sequence[Row], unseen: Sequence[tuple[Row, Call]], row_of: RowOf) -> list[Row]:
    """Returns the rows at unseen sizes, without those that were in the domain because nothing differs in torch.

    Waived conditions are required if a row that breaks them turned out wrong, and patterns of 0 and 1 leave the domain,
    unless other rows with the same kind of values are wrong as well: then these are among the rows. Nothing leaves the
    domain if the model is not at hand, as it has to be asked for that.

    Args:
        graph: The graph; its domain is changed.
        recorded: The rows of recorded calls.
        unseen: The rows at unseen sizes, with their calls.
        row_of: Makes the row of a call.
    """
    if graph.eager is None:
        return [row for row, _ in unseen]
    unseen = [*unseen, *_beyond_conditions(graph, recorded, unseen, row_of)]
    rows = [row for row, _ in unseen]
    domain, findings = graph.contract.domain, list[Finding]()
    usual, kept = settled(graph.contract.plan, graph.contract.sizes), [row.sizes for row in recorded]

    def leave(number: int, what: str) -> None:
        row = rows[number]
        findings.append(Finding("limit", what, f"{graph.runtime} does not serve {what}: {row.status}, {row.where}."))
        rows[number] = _outside(row)

    for number, (row, call) in enumerate(unseen):
        if row.is_wrong and (not small(row.sizes) or small(row.sizes) in map(small, kept)):
            required = domain.requiring(row.sizes, kept)
            if required != domain:
                new = [condition.text for condition in required.conditions if condition not in domain.conditions]
                found = _wrong_beside(graph, call, [usual], row.label, row_of)
                if found is not None:
                    rows.append(found[0])
                    break
                domain = required
                leave(number, f"sizes without {' and '.join(new)}")
    for number, row in enumerate(rows):
        if row.is_wrong and not domain.check.contains(row.sizes):
            rows[number] = _outside(row)
    suspects = [
        (number, call)
        for number, (row, call) in enumerate(unseen)
        if rows[number].is_wrong and small(row.sizes) and small(row.sizes) not in map(small, kept)
    ]
    for _, call in suspects:  # which grows: of several small sizes, one alone may be the reason
        for tried in _fewer_small(graph, call.sizes) if not _is_any_wrong(recorded, rows) else ():
            found = _wrong_beside(graph, call, tried, str(SmallSizes.of(call.sizes)), row_of)
            if found is not None and small(found[1].sizes) not in [small(other.sizes) for _, other in suspects]:
                suspects += [(len(rows), found[1])] if small(found[1].sizes) else []
                rows.append(found[0])
    if not _is_any_wrong(recorded, rows):
        proven = [small(row.sizes) for row in (*recorded, *rows) if row.is_right]
        for number, call in suspects:
            leave(number, str(SmallSizes.of(call.sizes)))
            proven = [pattern for pattern in proven if pattern != small(call.sizes)]
        if suspects:
            domain = replace(domain, patterns=tuple(p for p in domain.patterns if p.sizes in proven))
    if findings:
        plan = graph.contract.plan.with_findings(findings)
        graph.contract = replace(graph.contract, domain=domain, plan=plan)
    return rows


def without_pattern(graph: OnnxGraph, call: Call, row: Row, row_of: RowOf) -> Row:
    """Returns the row of a call that is wrong; inputs that no recorded call left out together may then be required.

    Args:
        graph: The graph; its domain is changed.
        call: The call.
        row: Its row.
        row_of: Makes the row of a call.
    """
    plan, domain = graph.contract.plan, graph.contract.domain
    absent = domain.optional.difference(call.tensors())
    if not absent or absent in absent_patterns(plan, graph.observation):
        return row
    given = settled(plan, {name: size or graph.contract.sizes[name] for name, size in call.sizes.items()})
    if graph.eager is None or _wrong_beside(graph, call, [given], row.label, row_of) is not None:
        return row
    together = " together" if len(absent) > 1 else ""
    text = f"{domain.names(absent)} may not be left out{together} in {graph.runtime}: {row.status}, {row.where}."
    narrower = replace(domain, absent={k: v for k, v in domain.absent.items() if k != absent})
    findings = [Finding("limit", domain.names(absent), text)]
    graph.contract = replace(graph.contract, domain=narrower, plan=plan.with_findings(findings))
    return _outside(row)


def _outside(row: Row) -> Row:
    return replace(row, status="outside", where=f"left the domain: {row.where}", locator=None)


def _beyond_conditions(
    graph: OnnxGraph, recorded: Sequence[Row], unseen: Sequence[tuple[Row, Call]], row_of: RowOf
) -> Iterator[tuple[Row, Call]]:
    """Yields the counterparts without small sizes of wrong calls that also break a waived condition, if wrong too."""
    plan, domain, kept = graph.contract.plan, graph.contract.domain, [row.sizes for row in recorded]
    for row, call in unseen:
        if row.is_wrong and small(row.sizes) and domain.requiring(row.sizes, kept) != domain:
            tried = sizes_beside(plan, call.sizes, graph.contract.sizes)
            found = _wrong_beside(graph, call, tried, str(SmallSizes.of(call.sizes)), row_of)
            if found is not None and not small(found[1].sizes):
                yield found


def _is_any_wrong(recorded: Sequence[Row], rows: Sequence[Row]) -> bool:
    """Whether a recorded call, or one without small sizes, is wrong: then small sizes are not the reason."""
    return any(row.is_wrong for row in (*recorded, *rows) if row.kind == "recorded" or not small(row.sizes))


def _fewer_small(graph: OnnxGraph, sizes: Mapping[str, int]) -> Iterator[list[dict[str, int]]]:
    """Yields sizes to try together in place of those that have small ones: with none, then with one less of several."""
    plan, usual, pattern = graph.contract.plan, graph.contract.sizes, small(sizes)
    yield sizes_beside(plan, sizes, usual)
    for name in pattern if len(pattern) > 1 else ():
        kept = {other: size for other, size in pattern.items() if other != name}
        larger = [settled(plan, {**found, **kept}) for found in sizes_beside(plan, sizes, usual)]
        yield [found for found in larger if small(found) == kept]


def _wrong_beside(
    graph: OnnxGraph, call: Call, tried: Sequence[Mapping[str, int]], label: str, row_of: RowOf
) -> tuple[Row, Call] | None:
    """The first of calls with the same kind of values at other sizes that is wrong, with its row."""
    found = ((row_of(other), other) for other in calls_beside(graph, call, tried, label))
    return next(((row, other) for row, other in found if row.is_wrong), None)
