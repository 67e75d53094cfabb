"""Writes the shipped catalogue, `verifier/rules.json` and its proofs; run it after a change to the prover or to a row.

The catalogue holds every rule that the model zoo and the op table's samples need, and the hand-named ones:

    python -m tests.verifier.collect
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from shardwright.cost.clusters.local import default_cluster
from shardwright.pcg.analysis import constant_nodes
from shardwright.pcg.graph import Graph
from shardwright.search.choices.blocks import blocked_choices
from shardwright.search.tree.planner import Planner
from shardwright.substitutions.rules.catalogue import CATALOGUE, SEARCHED
from shardwright.substitutions.rules.rules import Rule
from shardwright.verifier.catalogue import SHIPPED, Catalogue, Note
from shardwright.verifier.certificates import Certificate, RuleVerdict, certify, prover_digest
from shardwright.verifier.choices import Certified
from shardwright.verifier.store import SHIPPED_PROOFS, Verdicts
from tests.samples import SAMPLES
from tests.verifier.catalogue import cases


def zoo_graphs(*only: str, halved: bool = False) -> dict[str, Graph]:
    """The serial graphs of these models of the zoo, or of all, or with weights in bfloat16."""
    import torch

    from examples import zoo
    from shardwright.pcg.capture.capture import capture

    graphs: dict[str, Graph] = {}
    for name, make in vars(zoo).items():
        if (
            inspect.isfunction(make)
            and make.__module__ == zoo.__name__
            and not name.startswith("_")
            and (not only or name in only)
        ):
            torch.manual_seed(0)
            model, batch = make()
            graphs[name] = capture(model.bfloat16() if halved else model, batch).graph
    return graphs


def collect() -> Catalogue:
    """Prove everything anew."""
    certified = Certified(Catalogue())
    planner = Planner(default_cluster(4), certified, rules={rule.name: rule for rule in certified.equations()})
    halved = zoo_graphs("llama", halved=True)  # in which angles of positions are cast
    for name, graph in (*zoo_graphs().items(), *halved.items()):
        planner.plan(graph, name)  # what rules rewrite has operators of its own
        blocked = blocked_choices(graph, constant_nodes(graph))
        for node in graph.nodes:
            if not node.is_leaf:
                certified(node, [graph.types[name] for name in node.inputs], blocked.get(node.name, ()))
    for case in (case for row in SAMPLES for case in cases(row)):
        proven = certify(case.rule)
        if isinstance(proven, Certificate):
            certified.store.add(case.rule, proven)
    certified.equations(CATALOGUE)
    certified.steps()
    for name in set(CATALOGUE).difference(SEARCHED):
        certified.store.notes[CATALOGUE[name].hash] = Note(search=False)
    return certified.store


def ship(proven: Iterable[tuple[Rule, Certificate]], path: Path) -> None:
    """Write the proofs that the package carries: which prover found them, and what they rest on."""
    path.write_text(json.dumps({"prover": prover_digest()}))
    Verdicts(path).keep((rule, RuleVerdict("certified", certificate)) for rule, certificate in proven)


if __name__ == "__main__":
    start = time.perf_counter()
    store = collect()
    store.save(SHIPPED)
    ship(((store.rules[key], store.certificates[key]) for key in store.sorted()), SHIPPED_PROOFS)
    print(f"{len(store)} certificates in {time.perf_counter() - start:.1f} s", file=sys.stderr)
