"""Placement rules, many at once, run device by device: what is left to differ after the generator and the prover.

All rules of one call share one graph, so equal subterms are computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from shardwright.pcg.errors import GraphError
from shardwright.pcg.interpret import Array, denote, run_devices, run_serial
from shardwright.pcg.mesh import Mesh
from shardwright.substitutions.equations import Equation
from shardwright.verifier.falsifiers.devices import Devices

DEGREES = (2, 3)
_CHUNK = 2000


def recheck(rules: Sequence[Equation], seed: int = 0, meshes: Sequence[Mesh] = ()) -> dict[str, str]:
    """The rules whose sides differ on some mesh, by name, each with what differs."""
    wrong: dict[str, str] = {}
    if not rules:
        return wrong
    axes = rules[0].axes
    for mesh in meshes or [Mesh(axes, DEGREES[i:] + DEGREES[:i] if len(axes) > 1 else (DEGREES[i],)) for i in range(2)]:
        for start in range(0, len(rules), _CHUNK):
            wrong |= dict(_differences(rules[start : start + _CHUNK], mesh, seed))
    return wrong


def _differences(rules: Sequence[Equation], mesh: Mesh, seed: int) -> Iterator[tuple[str, str]]:
    devices, pairs = Devices(mesh, np.random.default_rng(seed)), list[tuple[str, str, str]]()
    for rule in rules:
        try:
            pairs += [(rule.name, left, right) for left, right in devices.add(rule)]
        except GraphError as error:
            yield rule.name, str(error)
    graph = devices.graph()
    held, whole = run_devices(graph, devices.data), run_serial(graph, devices.data)
    for name, left, right in pairs:
        kind = graph.types[left]
        if kind != graph.types[right]:
            yield name, f"on {mesh}: the left is {kind}, the right {graph.types[right]}"
            continue
        try:
            sides = [denote(held[side], kind, mesh) for side in (left, right)]
        except GraphError as error:
            yield name, f"on {mesh}: {error}"
            continue
        if not all(_same(side, whole[left]) for side in sides):
            yield name, f"on {mesh}: the sides denote different values"


def _same(x: Array, y: Array) -> bool:
    return np.array_equal(x, y) or np.allclose(x, y, rtol=1e-9, atol=1e-9, equal_nan=True)
