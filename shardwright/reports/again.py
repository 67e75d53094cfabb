"""The recomputation of a plan: its blocks, its costs and savings, and the same plan with everything kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from shardwright.cost.predict import Details, NodeCosts, details
from shardwright.cost.prediction import Prediction
from shardwright.cost.timeline.program import Programs
from shardwright.pcg.graph import Node
from shardwright.pcg.step.again import made_again
from shardwright.pcg.step.parameters import block_of
from shardwright.pcg.step.places import places
from shardwright.pcg.step.recompute import BlockRecompute
from shardwright.reports.units import ranges
from shardwright.search.plan import Plan


@dataclass(frozen=True, slots=True)
class Remade:
    """Blocks with the same recomputation. `blocks`: their names; "" for operators in no block.

    `mode`: a kind, or the places in the block that are recomputed. `compute_s`, `communication_s`: the seconds that
    recomputation adds to a step, all microbatches together.
    """

    blocks: str
    num_blocks: int
    mode: BlockRecompute
    num_operators: int
    compute_s: float
    communication_s: float


class Recomputation:
    """A plan's recomputation. `nodes`: the names of nodes that run twice."""

    def __init__(self, plan: Plan, costs: Mapping[str, NodeCosts], programs: Programs) -> None:
        """Find the recomputed nodes. `costs`: of the plan's nodes. `programs`: of its graph."""
        self.plan, self.costs, self.programs = plan, costs, programs
        self.nodes = made_again(plan.graph, plan.execution).twice
        self.everything_kept = replace(plan.execution, recompute="none")

    @cached_property
    def remade(self) -> tuple[Remade, ...]:
        """The recomputed blocks by mode, in the order of the model; empty where everything is kept."""
        plan, groups, blocks = self.plan, dict[BlockRecompute, dict[str, list[Node]]](), dict[str, list[Node]]()
        for node in plan.graph.nodes:
            if node.name in self.nodes:
                blocks.setdefault(block_of(node), []).append(node)
        where = places(plan.graph, {})
        for block, nodes in blocks.items():
            mode = plan.execution.kind_of(block)[1]
            if mode not in ("selective", "full"):
                mode = tuple(dict.fromkeys(where[node.name] for node in nodes if not node.is_parallel))
            groups.setdefault(mode, {})[block] = nodes
        costs_of_kept = self._kept.costs if groups else {}

        def more(nodes: Iterable[Node], what: str) -> float:
            return sum(getattr(self.costs[n.name], what) - getattr(costs_of_kept[n.name], what) for n in nodes)

        rows: list[Remade] = []
        for mode, alike in groups.items():
            nodes = [node for members in alike.values() for node in members]
            operators = sum(not node.is_parallel for node in nodes)
            added = (more(nodes, "compute_s"), more(nodes, "communication_s"))
            rows.append(Remade(names_of(alike), len(alike), mode, operators, *added))
        return tuple(rows)

    @cached_property
    def num_blocks(self) -> int:
        """The number of blocks in the model."""
        return len({block_of(node) for node in self.plan.graph.nodes} - {""})

    @cached_property
    def without(self) -> Prediction | None:
        """The prediction for the same plan with everything kept; None where nothing is recomputed."""
        return self._kept.prediction if self.remade else None

    @cached_property
    def _kept(self) -> Details:
        return details(self.programs, self.everything_kept)


def names_of(blocks: Iterable[str]) -> str:
    """Return names of blocks with ranges for consecutive numbers: `layers.0–15, 20`."""
    numbers, others = dict[str, list[int]](), list[str]()
    for block in dict.fromkeys(blocks):
        stem, _, last = block.rpartition(".")
        if last.isdecimal():
            numbers.setdefault(stem, []).append(int(last))
        else:
            others.append(block)
    numbered = (f"{stem}." * bool(stem) + ranges(numbers_of_stem) for stem, numbers_of_stem in numbers.items())
    return ", ".join(filter(None, (*others, *numbered)))
