"""The common part of commands that take a plan file: warnings, the choice of the cluster, the exit status."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from shardwright.cli import terminal
from shardwright.cli.status import INFEASIBLE
from shardwright.pcg.errors import MachineError, PlanError
from shardwright.pcg.files import require_writable

if TYPE_CHECKING:
    from shardwright.cost.clusters.cluster import Cluster
    from shardwright.reports.facts import PlanFacts
    from shardwright.reports.shown import Shown
    from shardwright.search.plan import Plan


def facts_to_show(plan_file: Path) -> PlanFacts:
    """Return the facts of a file's plan; warn on stderr if the file's prediction is outdated."""
    from shardwright.reports.facts import PlanFacts
    from shardwright.reports.wording import outdated
    from shardwright.search.plan import Plan

    facts = PlanFacts(Plan.load(plan_file))
    warn(plan_file, outdated(facts.plan.prediction, facts.prediction))
    return facts


def shown_of(plan_file: Path) -> Shown:
    """Return the contents of reports on a file's plan, after the same warning."""
    from shardwright.reports.shown import Shown

    shown = Shown.load(plan_file)
    warn(plan_file, shown.outdated)
    return shown


def target_beside(plan_file: Path, output: Path | None, suffix: str, what: str) -> Path:
    """Return the output file, by default beside the plan file; raise an error early if it cannot be written."""
    target = output or plan_file.with_suffix(suffix)
    if target.resolve() == plan_file.resolve():
        raise PlanError(f"{target}: this is the plan file, which {what} would replace; choose another path")
    require_writable(target, what, MachineError)
    return target


def warn(plan_file: Path, warning: str) -> None:
    """Warn about a plan file, unless it is ""."""
    if warning:
        terminal.note(f"warning: {plan_file}: {warning}")


def load_with_its_cluster(plan_file: Path, cluster: Cluster) -> Plan:
    """Load a file's plan; raise `PlanError` if `--cluster` was given and names another cluster."""
    from shardwright.search.plan import Plan

    plan = Plan.load(plan_file)
    if is_given("cluster") and cluster != plan.cluster:
        raise PlanError(
            f"--plan and --cluster contradict each other: {plan_file} is for {_told(plan.cluster)}, --cluster is "
            f"{_told(cluster)}; leave out --cluster, or plan for that one"
        )
    return plan


def is_given(option: str) -> bool:
    """Return whether the command that runs was given a value for an option."""
    return click.get_current_context().get_parameter_source(option) not in (None, ParameterSource.DEFAULT)


def _told(cluster: Cluster) -> str:
    return f"{cluster.name} ({cluster.num_devices} × {cluster.device.name}, {cluster.provenance})"


def status_of(*plans: Plan) -> int:
    """Return the exit status of a command that shows plans: not 0 if one does not fit, after saying by how much."""
    from shardwright.reports.facts import fits
    from shardwright.reports.wording import infeasible

    return status_said(*(infeasible(plan) for plan in plans if not fits(plan)))


def status_said(*unfit: str) -> int:
    """Return the same status from the messages on plans that do not fit; "" for a plan that does."""
    problems = list(filter(None, unfit))
    for problem in problems:
        terminal.note(f"error: {problem}")
    return INFEASIBLE if problems else 0
