"""The links of a machine as `nvidia-smi topo -m` or NCCL's topology file show them, one by one.

NVLinks are links between pairs of GPUs, or one switch where pairs have more of them together than a GPU has. Where they
do not join all GPUs, PCIe does: switches, a root for each processor, and the bridge between processors.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, count

from shardwright.cost.clusters.networks import GB, Box, machines
from shardwright.cost.clusters.presets import ASSUMED_NETWORK_GB_PER_S, GPUS, LINKS, SOCKET_GB_PER_S
from shardwright.cost.clusters.wiring import Wiring, groups, read_nccl, read_topo
from shardwright.pcg import checks
from shardwright.pcg.collectives.topology import MOST_NODES, Topology
from shardwright.pcg.errors import ClusterError

_Links = list[tuple[int, int, Fraction, float]]


def wired_topology(text: str, source: str, gpu: str, nodes: int = 1) -> Topology:
    """Return `nodes` machines wired as `text` says; the GPUs of a machine share its network.

    `gpu`: the kind of all GPUs, one of `GPUS`. Rates are the datasheet's, one way. The network's is that of the cards
    in NCCL's file, else an assumed 100 Gb/s. `source` names the text in errors.

    Raises:
        ClusterError, ScheduleError: a text of neither kind, an unknown GPU, one GPU alone, or too many of them.
    """
    if gpu not in GPUS:
        raise ClusterError(f"GPU {gpu!r} is not in the table; choose one of {', '.join(GPUS)}")
    plain = text.lstrip("\ufeff")
    wiring = (read_nccl if plain.lstrip().startswith("<") else read_topo)(plain, source)
    num_ranks = wiring.num_gpus * checks.positive_int(nodes, source, "nodes", "the number of machines")
    if not 2 <= num_ranks <= MOST_NODES:
        raise ClusterError(
            f"{source}: expected 2 to {MOST_NODES} GPUs, got {num_ranks}; give another number of machines"
        )
    box, rate = _box(wiring, gpu), Fraction(wiring.network_gb_per_s or ASSUMED_NETWORK_GB_PER_S)
    return machines(f"{nodes} × {wiring.num_gpus} {gpu}", [box] * nodes, [rate] * nodes, wiring.num_gpus)


def _box(wiring: Wiring, gpu: str) -> Box:
    links, relays = _nvlinks(wiring, gpu), list[str]()
    joined = groups(wiring.num_gpus, lambda i, j: wiring.nvlinks(i, j) > 0)
    everyone = range(wiring.num_gpus)
    most = max(sum(wiring.nvlinks(i, j) for j in everyone if j != i) for i in everyone)
    if most > GPUS[gpu].nvlinks > 0:  # the pairs share them, through switches
        links = list[tuple[int, int, Fraction, float]]()
        for group in joined:
            relays.append(f"NVSwitch {group[0]}")
            least = min(wiring.nvlinks(i, j) for i, j in combinations(group, 2)) if len(group) > 1 else 0
            rate, half_s = _gb(least * GPUS[gpu].nvlink_gb_per_s), LINKS["nvlink-switch"].hop_s / 2
            links += [(one, wiring.num_gpus + len(relays) - 1, rate, half_s) for one in group if least]
    if len(joined) > 1:
        links += _pcie(wiring, gpu, relays)
    return Box(wiring.num_gpus, links, tuple(relays))


def _nvlinks(wiring: Wiring, gpu: str) -> _Links:
    each, hop_s = GPUS[gpu].nvlink_gb_per_s, LINKS["nvlink-mesh"].hop_s
    pairs = ((i, j, wiring.nvlinks(i, j)) for i, j in combinations(range(wiring.num_gpus), 2))
    return [(i, j, _gb(many * each), hop_s) for i, j, many in pairs if many and each]


def _pcie(wiring: Wiring, gpu: str, relays: list[str]) -> Iterator[tuple[int, int, Fraction, float]]:
    """Yield the links of PCIe: a GPU to its switch or root, switches to roots, roots to each other."""
    size, rate, half_s = wiring.num_gpus, _gb(GPUS[gpu].host_gb_per_s), LINKS["pcie"].hop_s / 2
    numbers, roots = count(size + len(relays)), list[int]()
    for inside in groups(size, lambda i, j: wiring.paths[i][j] != "SYS"):
        roots.append(root := next(numbers))
        relays.append(f"PCIe root of GPU {inside[0]}")
        for switched in groups(size, lambda i, j: wiring.paths[i][j] in ("PIX", "PXB")):
            if switched[0] not in inside:
                continue
            above = root
            if len(switched) > 1:
                above = next(numbers)
                relays.append(f"PCIe switch of GPU {switched[0]}")
                yield above, root, rate, half_s
            for one in switched:
                yield one, above, rate, half_s
    for one, other in combinations(roots, 2):
        yield one, other, _gb(SOCKET_GB_PER_S), LINKS["sockets"].hop_s


def _gb(rate: float) -> Fraction:
    return Fraction(str(rate)) * GB
