"""Programs that make values again in backward: the same steps as one process takes, in less memory."""

from __future__ import annotations

from typing import Any

import torch

from examples.zoo import ZOO
from shardwright.lowering.launch import run_ranks
from shardwright.pcg.step.execution import Execution
from tests.each import each
from tests.lowering.runs import Case, Step, assert_same_step, parallel_step, serial_step
from tests.lowering.test_zoo import graphs


def case(name: str) -> Case:
    torch.manual_seed(0)
    model, batch = ZOO[name]()
    return Case(model.double(), batch)


@each("name", ["gpt", "llama"])
def test_steps_are_those_of_one_process(name: str) -> None:
    """Data parallelism, ZeRO-3 and split weights; dropout on. Twice, as memory is used again."""
    found = case(name)
    blocks = "blocks" if name == "gpt" else "model.layers"
    modes: list[Any] = ["selective", "full", {f"{blocks}.0": "full", "*": "selective"}, {f"{blocks}.1": "full"}]

    def body() -> list[Step]:
        steps = list[Step]()
        for graph in graphs(found):
            for recompute in modes:
                parallel = found.lower(graph, Execution(recompute=recompute))
                parallel_step(parallel, found.batch)
                parallel.zero_grad()
                steps.append(parallel_step(parallel, found.batch))
        return steps

    expected = serial_step(found)
    for steps in run_ranks(body, 2, 120):
        for step in steps:
            assert_same_step(step, expected, 1e-9)
