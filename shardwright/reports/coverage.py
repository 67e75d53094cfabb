"""The rules of a catalogue that the search used: loaded → matched → fired.

    form       matched                                            fired
    row        offered as a certified choice to an operator       chosen for an operator of the plan, per mesh axis
    steps      a tensor's producer and a reader can ask for it    in the plan, one step directly after the other
    serial     backtracking found a place for it in a leaf        among the plan's rewrites
    placement  a side without its parallel operators occurs       the side occurs in the plan, in the rule's layouts

The report is derived from the captured graph and the finished plan, and from the places that backtracking counts as it
goes (`Planner.places`); the search does nothing for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.analysis import constant_nodes
from shardwright.pcg.choice import Choice
from shardwright.pcg.graph import OPAQUE, Graph, Node
from shardwright.pcg.moves import FUSED, MOVES
from shardwright.pcg.parallel import COMBINE, PARTITION
from shardwright.reports.occurrences import Occurrences
from shardwright.reports.report import Paragraph, Report
from shardwright.search.choices.blocks import blocked_choices
from shardwright.search.plan import Plan
from shardwright.search.tree.planner import Planner
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.rules.rowrules import RowRule
from shardwright.substitutions.rules.rules import KINDS, Rule, kind_of
from shardwright.verifier.choices import Certified, rule_of


@dataclass
class Tally:
    """A rule: whether the catalogue holds it (or it was proven on demand), how often it matched and fired."""

    form: str
    name: str
    loaded: bool
    matched: int = 0
    fired: int = 0


@dataclass
class Coverage:
    """The use of every rule over all plans that were added; `tallies` is by rule hash."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    plans: list[str] = field(default_factory=list)
    _named: dict[tuple[str, str], str] = field(default_factory=dict)
    _placements: dict[str, Equation] = field(default_factory=dict)

    @classmethod
    def of(cls, certified: Certified) -> Coverage:
        """Return the coverage of the rules that the search may use, with nothing used yet."""
        return cls.of_rules([*certified.store.rules.values(), *certified.equations(), *certified.steps()])

    @classmethod
    def of_rules(cls, rules: Iterable[Rule]) -> Coverage:
        """Return the coverage of some rules, with nothing used yet."""
        coverage = cls()
        for rule in rules:
            coverage._load(rule, loaded=True)
        return coverage

    def _load(self, rule: Rule, loaded: bool) -> Tally:
        form = kind_of(rule)
        if rule.hash not in self.tallies:
            self.tallies[rule.hash] = Tally(form, rule.name, loaded)
            self._named[form, rule.name] = rule.hash
            if isinstance(rule, Equation) and rule.axes:
                self._placements[rule.hash] = rule
        return self.tallies[rule.hash]

    def _at(self, form: str, name: str) -> Tally | None:
        key = self._named.get((form, name))
        return None if key is None else self.tallies[key]

    def plan(
        self, model: str, graph: Graph, cluster: Cluster, certified: Certified, rules: Mapping[str, Equation]
    ) -> Plan:
        """Search a plan and count the rules that it used."""
        planner = Planner(cluster, certified, None, rules)
        plan = planner.plan(graph, model)
        self.add(model, graph, plan, certified, planner.places)
        return plan

    def add(self, model: str, graph: Graph, plan: Plan, certified: Certified, places: Mapping[str, int]) -> None:
        """Count the rules that the search of a plan used; `places` is the planner's count of serial matches."""
        self.plans.append(f"{model} on {plan.cluster.name} ({plan.cluster.num_devices} devices): {plan.mesh}")
        self._count_rows(graph, plan.graph, certified)
        self._count_steps(graph, plan.graph, certified)
        self._count("serial", places, _rewrites(plan))
        serial, parallel = Occurrences(graph), Occurrences(plan.graph)
        for key, rule in self._placements.items():
            tally = self.tallies[key]
            tally.matched += serial.erased(rule)
            tally.fired += parallel.of(rule)

    def _count(self, form: str, matched: Mapping[str, int], fired: Mapping[str, int]) -> None:
        for name in {*matched, *fired}:
            if (tally := self._at(form, name)) is not None:
                tally.matched += matched.get(name, 0)
                tally.fired += fired.get(name, 0)

    def _count_rows(self, graph: Graph, planned: Graph, certified: Certified) -> None:
        rules = _RowRules(certified)
        for serial, nodes in ((graph, graph.nodes), _rewritten(graph, planned)):
            blocked = blocked_choices(serial, constant_nodes(serial)) if nodes else {}
            for node in nodes:
                for rule in rules.offered(serial, node, blocked.get(node.name, ())):
                    self._load(rule, loaded=False).matched += 1
        for node in planned.nodes:
            for choice in node.split:
                self._load(rules.rule(planned, node, choice), loaded=False).fired += 1

    def _count_steps(self, graph: Graph, planned: Graph, certified: Certified) -> None:
        rules = _RowRules(certified)
        two_axes = len(planned.mesh) > 1
        self._count("steps", Counter(_offered_steps(graph, rules, two_axes)), Counter(_taken_steps(planned)))

    # ---- results ----

    def by_form(self) -> dict[str, dict[str, int]]:
        """Return, by form, the numbers of loaded rules, of these that matched and fired, and of rules on demand."""
        by_form = {form: {"loaded": 0, "matched": 0, "fired": 0, "on_demand": 0} for form in KINDS}
        for tally in self.tallies.values():
            counts = by_form[tally.form]
            if tally.loaded:
                counts["loaded"] += 1
                counts["matched"] += tally.matched > 0
                counts["fired"] += tally.fired > 0
            else:
                counts["on_demand"] += 1
        return by_form

    def ranked(self) -> list[Tally]:
        """Return rules by form, the most often fired first."""
        return sorted(self.tallies.values(), key=lambda t: (KINDS.index(t.form), -t.fired, -t.matched, t.name))


@dataclass(frozen=True)
class CoverageReport(Report):
    """The totals by form, and per form the `most` rules that fired most and the rules that never did."""

    coverage: Coverage
    most: int = 12

    def paragraphs(self) -> list[Paragraph]:
        rows = [
            (form, *(str(counts[key]) for key in ("loaded", "matched", "fired", "on_demand")))
            for form, counts in self.coverage.by_form().items()
            if any(counts.values())
        ]
        columns = ("form", ">loaded", ">matched", ">fired", ">on demand")
        totals = Paragraph("Rules that the search used", self.coverage.plans, columns, rows)
        return [totals, *(self._form(row[0]) for row in rows)]

    def _form(self, form: str) -> Paragraph:
        tallies = [t for t in self.coverage.ranked() if t.form == form]
        fired = [t for t in tallies if t.fired]
        lines = []
        if form == "steps" or (form == "serial" and len(tallies) < 100):
            lines = [f"never fired: {', '.join(t.name for t in tallies if not t.fired) or 'none'}"]
        shown = f", the {self.most} most frequent" if len(fired) > self.most else ""
        rows = [(t.name, str(t.matched), str(t.fired)) for t in fired[: self.most]]
        columns = ("rule", ">matched", ">fired") if rows else ()
        return Paragraph(f"{form}: {len(fired)} fired{shown}", lines, columns, rows)

    def data(self) -> dict[str, Any]:
        rules = list(map(asdict, self.coverage.ranked()))
        return {"plans": self.coverage.plans, "forms": self.coverage.by_form(), "rules": rules}


def _rewritten(graph: Graph, planned: Graph) -> tuple[Graph, list[Node]]:
    """Return the serial graph of a plan, and the operators that rewrites added to it."""
    erased = planned.erased()
    original = {(node.op, node.name.partition(".")[0]) for node in graph.nodes}
    return erased, [node for node in erased.nodes if (node.op, node.name.partition(".")[0]) not in original]


def _rewrites(plan: Plan) -> Counter[str]:
    return Counter(name for rewrite in plan.report.rewrites for name, _ in rewrite.steps)


class _RowRules:
    """The row rules behind choices, each derived once."""

    def __init__(self, certified: Certified) -> None:
        self.certified = certified
        self._rules: dict[Hashable, RowRule] = {}

    def offered(self, graph: Graph, node: Node, blocked: Iterable[Choice]) -> list[RowRule]:
        """Return the rules of a node's certified choices; none for leaves, parallel and opaque operators."""
        if node.is_leaf or node.is_parallel or node.op == OPAQUE:
            return []
        operands = [graph.types[name] for name in node.inputs]
        return [self.rule(graph, node, choice) for choice in self.certified(node, operands, tuple(blocked))]

    def rule(self, graph: Graph, node: Node, choice: Choice) -> RowRule:
        operands = [graph.types[name] for name in node.inputs]
        key = (node.op, node.attrs, tuple((t.shape, t.dtype) for t in operands), choice)
        if key not in self._rules:
            self._rules[key] = rule_of(node, operands, choice)
        return self._rules[key]


# ---- parallel operators ----


def _offered_steps(graph: Graph, rules: _RowRules, two_axes: bool) -> Iterator[str]:
    """Yield the step rules between some layouts of each tensor's producer and of one of its readers."""
    constants = constant_nodes(graph)
    made: dict[str, set[Placement]] = {}
    wanted: dict[str, set[Placement]] = {name: {Placement("R")} for name in dict(graph.outputs).values()}
    for node in graph.nodes:
        if node.op == "parameter":
            rank = len(graph.types[node.name].shape)
            made[node.name] = {Placement("R"), *(Placement("S", dim) for dim in range(rank))}
        for rule in rules.offered(graph, node, ()):
            made.setdefault(node.name, set()).add(rule.result)
            for name, placement in zip(node.inputs, rule.operands, strict=True):
                wanted.setdefault(name, set()).add(placement)
    for name in made.keys() - constants:
        pairs = {(x, y) for x in made[name] for y in wanted.get(name, ()) if x != y}
        chains = {MOVES[x.kind, y.kind].operators for x, y in pairs if (x.kind, y.kind) in MOVES}
        yield from (FUSED[chain] for chain in chains if len(chain) == 2)
        single = sorted({op for chain in chains for op in chain})
        yield from (f"{first}_then_{second}" for first in single for second in single if two_axes)


def _taken_steps(planned: Graph) -> Iterator[str]:
    """Yield the step rules of a plan: two parallel operators, the second the only reader of the first."""
    for node in planned.nodes:
        before = planned.by_name[node.inputs[0]] if node.is_parallel else None
        if before is None or not before.is_parallel or planned.users[before.name] != (node.name,):
            continue
        if before.attr("axis") != node.attr("axis"):
            yield f"{before.op}_then_{node.op}"
        elif (before.op, node.op) in FUSED and not _stays(planned, before, node):
            yield FUSED[before.op, node.op]


def _stays(planned: Graph, combined: Node, node: Node) -> bool:
    """Return whether a partition in other blocks, of the same dimension, follows a combine: no all-to-all."""
    if (combined.op, node.op) != (COMBINE, PARTITION):
        return False
    axis = planned.mesh.index(str(node.attr("axis")))
    return planned.types[combined.inputs[0]].layouts[axis].dim == node.attr("dim")
