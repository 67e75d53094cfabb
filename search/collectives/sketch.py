"""A user's hints for synthesis as a small JSON: which links, which ranks talk to other machines, symmetry, pieces.

The idea is TACCL's communication sketch (Shah et al., NSDI 2023): whoever knows a machine says what a search need not
find out. All keys are optional:

    {"without": [[0, 3], [3, 0]],        links that are not used
     "machine": 8,                       ranks of a machine, for the next two
     "send": [0], "receive": [1],        its ranks that send to other machines, and receive from them
     "symmetry": [[8, 16]],              (shift, period): rank r acts as the one `shift` after it among `period` ranks
     "pieces": [1, 4]}                   numbers of chunks of a unit that are tried
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from shardwright.pcg.collectives.topology import Edge, Topology
from shardwright.pcg.errors import ScheduleError

MOST_CHARACTERS = 1 << 20
_KEYS = ("without", "machine", "send", "receive", "symmetry", "pieces")


@dataclass(frozen=True, slots=True)
class Sketch:
    """A user's advice to a search: links to leave out, and facts to take for granted. None: it decides by itself."""

    without: frozenset[Edge] = frozenset()
    machine: int = 0
    send: tuple[int, ...] | None = None
    receive: tuple[int, ...] | None = None
    symmetry: tuple[tuple[int, int], ...] | None = None
    pieces: tuple[int, ...] | None = None

    def applied(self, topology: Topology) -> Topology:
        """Return the topology without the links that are not to be used.

        Raises:
            ScheduleError: a link that the topology does not have, or machines that do not divide its ranks.
            ClusterError: ranks without a connection.
        """
        unknown = sorted(self.without - set(topology.by_edge))
        if unknown:
            _refuse("without", f"links of {topology.name!r}", list(unknown[0]))
        if self.machine and topology.num_ranks % self.machine:
            _refuse("machine", f"a divisor of {topology.num_ranks} ranks", self.machine)
        links = tuple(link for link in topology.links if self._is_used(topology, (link.src, link.dst)))
        edges = {(link.src, link.dst) for link in links}
        shared = tuple(replace(one, edges=one.edges & edges) for one in topology.resources if one.edges & edges)
        return Topology(topology.name, topology.num_ranks, links, topology.relays, shared)

    def _is_used(self, topology: Topology, edge: Edge) -> bool:
        src, dst = (self._machine(topology, node) for node in edge)
        if edge in self.without:
            return False
        if src == dst or not self.machine:
            return True
        sends = self.send is None or edge[0] >= topology.num_ranks or edge[0] % self.machine in self.send
        return sends and (
            self.receive is None or edge[1] >= topology.num_ranks or edge[1] % self.machine in self.receive
        )

    def _machine(self, topology: Topology, node: int) -> int:
        """Return the machine of a rank, or of a relay all of whose ranks are of one; -1 for what joins machines."""
        if not self.machine:
            return 0
        near = [node] if node < topology.num_ranks else topology.successors[node]
        machines = {rank // self.machine if rank < topology.num_ranks else -1 for rank in near}
        return machines.pop() if len(machines) == 1 else -1


def read_sketch(text: str) -> Sketch:
    """Read a sketch.

    Raises:
        ScheduleError: no JSON, an unknown key, or a value of another form.
    """
    if len(text) > MOST_CHARACTERS:
        _refuse("file", f"at most {MOST_CHARACTERS} characters", len(text))
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScheduleError(f"sketch: expected JSON, got {error}; correct the file") from error
    if not isinstance(document, dict):
        _refuse("file", "an object", type(document).__name__)
    unknown = [key for key in document if key not in _KEYS]
    if unknown:
        _refuse("file", f"keys among {', '.join(_KEYS)}", unknown[0])
    if ("send" in document or "receive" in document) and "machine" not in document:
        _refuse("machine", "the ranks of a machine, beside send and receive", None)
    machine = _numbers("machine", [document.get("machine", 0)], 0)[0]
    return Sketch(
        frozenset(_pairs("without", document.get("without", []))),
        machine,
        _numbers("send", document["send"], 0, machine) if "send" in document else None,
        _numbers("receive", document["receive"], 0, machine) if "receive" in document else None,
        tuple(_pairs("symmetry", document["symmetry"])) if "symmetry" in document else None,
        _numbers("pieces", document["pieces"], 1) if "pieces" in document else None,
    )


def _pairs(key: str, value: object) -> list[Edge]:
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        _refuse(key, "a list of pairs of numbers", value)
    return [(first, second) for first, second in (_numbers(key, pair, 0) for pair in value)]


def _numbers(key: str, value: object, least: int, below: int = 1 << 20) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        _refuse(key, "a list of numbers", value)
    wrong = [one for one in value if not isinstance(one, int) or isinstance(one, bool) or not least <= one < below]
    if wrong:
        _refuse(key, f"whole numbers from {least} to {below - 1}", wrong[0])
    return tuple(value)


def _refuse(key: str, expected: str, got: object) -> NoReturn:
    raise ScheduleError(f"sketch: {key}: expected {expected}, got {got!r}; correct it")
