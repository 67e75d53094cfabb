"""The falsifier of placement rules: both sides run device by device at degrees 2 and 3, on small tensors.

It shares only the rule with the proofs: graphs are typed by `pcg`, run by the reference interpreter, and compared by
the types of their results and the logical tensors that the devices' values denote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardwright.pcg.errors import GraphError, RuleError
from shardwright.pcg.graph import Graph
from shardwright.pcg.interpret import Array, denote, run_devices, run_serial
from shardwright.pcg.mesh import Mesh
from shardwright.substitutions.equations import Equation
from shardwright.verifier.falsifiers.devices import Devices
from shardwright.verifier.falsifiers.mismatch import ERRORS, Mismatch, largest_of, same

DEGREES = (2, 3)


def falsify_placement(rule: Equation, degrees: Sequence[int] = DEGREES, seed: int = 0) -> Mismatch | None:
    """Return a counterexample to a placement rule, tensors or types that differ, or None if none is found.

    Raises `RuleError` if the left side cannot be run at any of the sizes tried.
    """
    for shift in range(len(degrees)):
        sizes = [degrees[(shift + i) % len(degrees)] for i in range(len(rule.axes))]
        try:
            mismatch = _on(rule, Mesh(rule.axes, tuple(sizes)), seed)
        except (RuleError, *ERRORS) as error:
            raise RuleError(f"rule {rule.name!r} cannot be run: {error}") from None
        if mismatch is not None:
            return mismatch
    return None


def _on(rule: Equation, mesh: Mesh, seed: int) -> Mismatch | None:
    Devices(mesh, np.random.default_rng(seed)).add(replace(rule, right=rule.left))  # the left side exists
    devices = Devices(mesh, np.random.default_rng(seed))
    sizes = {**devices.sizes(rule), **dict(zip(mesh.names, mesh.sizes, strict=True))}
    shown = {name: sizes[name] for name in (*mesh.names, *sorted(rule.sizes)) if name in sizes}
    try:
        pairs = devices.add(rule)
    except (GraphError, *ERRORS) as error:
        return Mismatch(rule.name, shown, {}, np.zeros(0), f"not defined: {error}")
    graph = devices.graph()
    with np.errstate(all="ignore"):
        held, whole = run_devices(graph, devices.data), run_serial(graph, devices.data)
    tensors = {str(graph.by_name[name].attr("target")): array for name, array in devices.data.items()}
    for left, right in pairs:
        kinds = graph.types[left], graph.types[right]
        if (kinds[0].shape, kinds[0].layouts) != (kinds[1].shape, kinds[1].layouts):
            return Mismatch(rule.name, shown, tensors, whole[left], f"{kinds[1]}, another type than {kinds[0]}")
        want, have = _denoted(held[left], graph, left), _denoted(held[right], graph, right)
        largest = max(map(largest_of, (want, whole[left])))
        for value in (have, want):
            if not same(whole[left], value, largest):
                return Mismatch(rule.name, shown, tensors, whole[left], value)
    return None


def _denoted(arrays: Sequence[Array], graph: Graph, name: str) -> Array:
    try:
        return np.asarray(denote(arrays, graph.types[name], graph.mesh), float)
    except GraphError:  # copies that differ denote nothing
        return np.full(graph.types[name].shape, np.inf)
