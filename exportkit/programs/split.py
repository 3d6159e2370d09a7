"""The fallback where one graph cannot serve all recorded calls: a program for each cluster of them.

In come a model, its calls, and what became of one graph; out go several exports, each of them proven, or nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from exportkit.arguments.build import build_call
from exportkit.calls.observation import Observation
from exportkit.errors import ExportError, ExportkitError
from exportkit.plan.leaves import PlannedLeaf
from exportkit.probing.planning import BoundPlan, one_size
from exportkit.programs.clusters import Cluster, Landmarks, clusters_of
from exportkit.programs.exported import Exported
from exportkit.programs.failure import in_one_line
from exportkit.programs.programs import ExportedPrograms, Split
from exportkit.programs.replay import returns, unlike_the_model
from exportkit.running.eager import run_eager
from exportkit.trees import flatten

_MOST_PROGRAMS = 6  # more clusters than these are no kinds of calls

PlanOf = Callable[[Observation], BoundPlan]
ExportOf = Callable[[BoundPlan], Exported]


def wrong_on_a_cluster(exported: Exported, observation: Observation) -> str:
    """Returns how a graph fails on a recorded call of some cluster; nothing if it serves all, or if there is one.

    The program is first run in torch, which takes no longer than to run the model; only one that seems to be wrong is
    translated and proven.

    Args:
        exported: The export of one graph.
        observation: The calls that it was made from.
    """
    clusters = clusters_of(observation, Landmarks.of(observation))
    if len(clusters) < 2 or not unlike_the_model(exported, [cluster.calls[0] for cluster in clusters]):
        return ""
    problems = _problems(exported, unseen=False)
    return problems[0] if problems else ""


def split_export(
    observation: Observation, why: str | ExportkitError, plan_of: PlanOf, export_of: ExportOf
) -> ExportedPrograms | None:
    """Returns a program for each cluster of calls; None if there is only one, or if some cluster cannot be served.

    Args:
        observation: The calls.
        why: What became of one graph: the error, or what is wrong with it.
        plan_of: Makes the plan of calls.
        export_of: Exports what a plan says.
    """
    landmarks = Landmarks.of(observation)
    clusters = clusters_of(observation, landmarks)
    if not 1 < len(clusters) <= _MOST_PROGRAMS:
        return None
    try:
        whole = plan_of(observation)
    except ExportkitError:
        whole = None
    programs: dict[str, Exported] = {}
    for cluster in clusters:
        exported = _proven(_plans(cluster, landmarks, whole, plan_of), landmarks.first, export_of)
        if exported is None:
            return None
        programs[cluster.name] = exported
    reason = in_one_line(why) if isinstance(why, ExportkitError) else why
    kinds = {cluster.name: cluster.kind for cluster in clusters}
    return ExportedPrograms(programs, Split(reason, landmarks, kinds, {c.name: c.calls for c in clusters}))


def _proven(plans: Iterator[BoundPlan], first: str | None, export_of: ExportOf) -> Exported | None:
    """The export of the first plan with which it can be proven."""
    tried: list[BoundPlan] = []
    untraceable: list[tuple[PlannedLeaf, ...]] = []
    try:
        for plan in plans:
            if plan in tried or plan.leaves in untraceable:
                continue
            tried.append(plan)
            try:
                exported = export_of(plan)
            except ExportkitError as error:
                untraceable += [plan.leaves] if isinstance(error, ExportError) and error.__cause__ is not None else []
                continue
            if not _differs_for_one(exported, first) and not _problems(exported):
                return exported
    except ExportkitError:  # there is no plan
        return None
    return None


def _plans(cluster: Cluster, landmarks: Landmarks, whole: BoundPlan | None, plan_of: PlanOf) -> Iterator[BoundPlan]:
    """Yields plans for a cluster: for all sizes that the model may take, for its kind of calls, for the sizes seen.

    The last ones are without inputs that no call had: with a filled cache a model may take a mask for something else.
    """
    own = plan_of(cluster.observation)
    varied = [] if whole is None else [_refound(own.widened(whole))]
    for plan in (*varied, own):
        yield from _limited(plan, cluster, landmarks)
    restored = {leaf.argument for leaf in own.leaves if leaf.restored}
    if restored:
        yield from _limited(plan_of(cluster.observation.without(restored)), cluster, landmarks)


def _limited(plan: BoundPlan, cluster: Cluster, landmarks: Landmarks) -> Iterator[BoundPlan]:
    yield plan
    yield _filled(plan)
    yield _of_that_kind(_filled(plan), cluster, landmarks)


def _refound(plan: BoundPlan) -> BoundPlan:
    """The plan with findings about sizes that are still so."""
    findings = [finding for finding in plan.findings if finding.kind not in ("one call", "one size")]
    return replace(plan, findings=(*findings, *one_size(plan)))


def _differs_for_one(exported: Exported, first: str | None) -> bool:
    """Whether the program returns something else than the model for one token: the proof need not have such a call."""
    plan = exported.plan
    for size in plan.by_path[first].sizes[1:] if first in plan.by_path else ():
        if size.variable is None or plan.variable(size.variable).minimum > 1:
            continue
        try:
            arguments = build_call(plan, exported.observation, {**exported.sizes, size.variable: 1})
            outputs = flatten(run_eager(exported.model, exported.method, arguments)).tensors()
        except Exception:  # whatever the model raises: it refuses one token, as it may have no room for an image
            continue
        if not returns(exported, arguments, outputs):
            return True
    return False


def _filled(plan: BoundPlan) -> BoundPlan:
    """The plan limited to caches that hold something, as those of its calls do."""
    for leaf in plan.leaves:
        name = None if leaf.growing is None else leaf.sizes[leaf.growing].variable
        plan = plan if name is None else _at_least(plan, name, 1)
    return plan


def _of_that_kind(plan: BoundPlan, cluster: Cluster, landmarks: Landmarks) -> BoundPlan:
    """The plan limited to one token, or to several, as the calls of a cluster have."""
    first = None if landmarks.first is None else plan.by_path.get(landmarks.first)
    for axis, size in enumerate(() if first is None else first.sizes):
        if axis and size.variable is not None:
            plan = plan.static(size.variable) if axis in cluster.kind.single else _at_least(plan, size.variable, 2)
    return plan


def _at_least(plan: BoundPlan, name: str, minimum: int) -> BoundPlan:
    variable = plan.variable(name)
    smallest = min(size for size in variable.seen if size is not None)
    return plan.range(name, max(variable.minimum, min(minimum, smallest)), variable.maximum)


def _problems(exported: Exported, unseen: bool = True) -> tuple[str, ...]:
    """What stands against a proof of an export, in onnxruntime."""
    with tempfile.TemporaryDirectory(prefix="exportkit-proof-") as folder:
        try:
            report = exported.to_onnx(Path(folder) / "model.onnx").verify(unseen)
        except ExportkitError as error:
            return (in_one_line(error),)
    return report.problems()
