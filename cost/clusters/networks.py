"""Networks of known machines, link by link, and the table of all presets of topologies.

Rates are those of datasheets, one way; MI250, A100 and NDv2 as the papers that publish optima for them take them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import NamedTuple

from shardwright.cost.clusters.shapes import complete, dragonfly, fat_tree, grid, ring, star
from shardwright.pcg import checks
from shardwright.pcg.collectives.topology import MOST_NODES, Edge, Resource, Topology, joined
from shardwright.pcg.errors import ClusterError

GB = 10**9
_NVLINK_S, _XGMI_S, NETWORK_S = 0.7e-6, 0.7e-6, 2.6e-6

# The NVLinks between the GPUs of a DGX-1 with V100, in pairs: a hybrid cube mesh. NVIDIA, "DGX-1 With Tesla V100 System
# Architecture" (2017), figure 4; SCCL (PPoPP 2021), figure 1. Each GPU has six.
DGX1_NVLINKS: Mapping[Edge, int] = {
    (0, 1): 2, (0, 2): 1, (0, 3): 1, (0, 4): 2, (1, 2): 1, (1, 3): 2, (1, 5): 1, (2, 3): 2, (2, 6): 2, (3, 7): 1,
    (4, 5): 2, (4, 6): 1, (4, 7): 1, (5, 6): 1, (5, 7): 2, (6, 7): 2,
}  # fmt: skip

# The xGMI links between the 16 dies of eight MI250: ForestColl (arXiv 2402.06787), figure "AMD MI250 topology".
MI250_XGMI: Mapping[Edge, int] = {
    **{(die, die + 1): 4 for die in range(0, 16, 2)},
    (0, 4): 2, (3, 7): 2, (8, 12): 2, (11, 15): 2,
    (0, 8): 1, (1, 5): 1, (1, 9): 1, (1, 10): 1, (2, 6): 1, (2, 9): 1, (2, 10): 1, (3, 11): 1, (4, 6): 1, (5, 6): 1,
    (5, 7): 1, (9, 13): 1, (10, 14): 1, (12, 14): 1, (13, 14): 1, (13, 15): 1,
}  # fmt: skip


# Azure's NDv2, a DGX-1 with one NIC, as TACCL (NSDI 2023) measured it for 1 MB: 23 or 46 µs per MB between GPUs, 105 µs
# per MB over the NIC.
_NDV2_GB_PER_S, _NDV2_NIC_GB_PER_S, _NDV2_S = Fraction(1000, 46), Fraction(1000, 105), 0.3e-6


class Box(NamedTuple):
    """A machine alone: its ranks, the switches among them, and its links."""

    num_ranks: int
    links: Sequence[tuple[int, int, Fraction, float]]  # both ways: node, node, rate, latency
    relays: tuple[str, ...] = ()


def switched_box(gpus: int, gb_per_s: int) -> Box:
    """GPUs around their NVSwitches, which are one switch to them."""
    return Box(gpus, [(gpu, gpus, Fraction(gb_per_s * GB), _NVLINK_S / 2) for gpu in range(gpus)], ("NVSwitch",))


def wired_box(
    num_ranks: int, cables: Mapping[Edge, int], gb_per_s: Fraction | int, latency_s: float = _NVLINK_S
) -> Box:
    """GPUs with cables from one to another, each with the same rate."""
    return Box(num_ranks, [(a, b, Fraction(many * gb_per_s * GB), latency_s) for (a, b), many in cables.items()])


def machines(
    name: str,
    boxes: Sequence[Box],
    network_gb_per_s: Sequence[Fraction | int],
    ranks_per_nic: int = 1,
    network_s: float = NETWORK_S,
) -> Topology:
    """Return boxes joined by one network switch, to which each rank of a box has a link of the box's rate.

    Where `ranks_per_nic` ranks share a NIC, they share that rate as well.
    """
    num_ranks = sum(box.num_ranks for box in boxes)
    links, relays = list[tuple[int, int, Fraction, float]](), list[str]()
    nics = list[Resource]()
    start, switch = 0, num_ranks + sum(len(box.relays) for box in boxes)
    for index, (box, gb_per_s) in enumerate(zip(boxes, network_gb_per_s, strict=True)):
        place, rate = _placed(box, start, num_ranks + len(relays)), Fraction(gb_per_s) * GB
        links += [(place(a), place(b), speed, latency) for a, b, speed, latency in box.links]
        relays += [f"{relay} {index}" for relay in box.relays]
        if len(boxes) > 1:
            ranks = range(start, start + box.num_ranks)
            links += [(rank, switch, rate, network_s / 2) for rank in ranks]
            if ranks_per_nic > 1:
                nics += _nics(ranks, ranks_per_nic, switch, rate)
        start += box.num_ranks
    relays += ["network"] if len(boxes) > 1 else []
    return Topology(name, num_ranks, tuple(joined(links)), tuple(relays), tuple(nics))


def _placed(box: Box, start: int, first_relay: int) -> Callable[[int], int]:
    return lambda node: start + node if node < box.num_ranks else first_relay + node - box.num_ranks


def _nics(ranks: range, ranks_per_nic: int, switch: int, rate: Fraction) -> Iterator[Resource]:
    for nic in range(0, len(ranks), ranks_per_nic):
        sharing = ranks[nic : nic + ranks_per_nic]
        name = f"NIC of rank {sharing[0]}"
        yield Resource(f"{name} out", rate, frozenset((rank, switch) for rank in sharing))
        yield Resource(f"{name} in", rate, frozenset((switch, rank) for rank in sharing))


def same(name: str, box: Box, network_gb_per_s: Fraction | int, ranks_per_nic: int = 1) -> Callable[[int], Topology]:
    """Return what makes a topology of any number of equal machines."""
    return lambda nodes: machines(
        name if nodes == 1 else f"{name} x{nodes}", [box] * nodes, [network_gb_per_s] * nodes, ranks_per_nic
    )


def unlike(nodes: int) -> Topology:
    """A DGX H100 and `nodes` - 1 DGX A100 on one network, each GPU with the NIC of its own machine."""
    boxes = [switched_box(8, 450), *(switched_box(8, 300) for _ in range(nodes - 1))]
    return machines(f"unlike x{nodes}", boxes, [50] + [25] * (nodes - 1))


def z52() -> Topology:
    """A Gigabyte Z52 with eight MI50, as SCCL (PPoPP 2021) takes it: a ring of eight, by xGMI and PCIe 4 in turn."""
    links = [(gpu, (gpu + 1) % 8, Fraction(27 * GB), _XGMI_S) for gpu in range(8)]
    return Topology("amd-z52", 8, tuple(joined(links)))


class Preset(NamedTuple):
    """A topology with a name: what makes it, from numbers such as nodes, and the numbers that it has by default."""

    make: Callable[..., Topology]
    default: tuple[int, ...]
    about: str


_LINK = 50 * GB
PRESETS: Mapping[str, Preset] = {
    "dgx1": Preset(same("dgx1", wired_box(8, DGX1_NVLINKS, 25), Fraction(25, 2), 2), (1,),
                   "nodes: 8 V100, a hybrid cube mesh of NVLinks at 25 GB/s; two GPUs share a NIC of 12.5 GB/s"),
    "ndv2": Preset(same("ndv2", wired_box(8, DGX1_NVLINKS, _NDV2_GB_PER_S, _NDV2_S), _NDV2_NIC_GB_PER_S, 8), (2,),
                   "nodes: Azure NDv2, a DGX-1 whose GPUs share one NIC, as TACCL measured it"),
    "dgx2": Preset(same("dgx2", switched_box(16, 150), Fraction(25, 2), 2), (1,),
                   "nodes: 16 V100, NVSwitches at 150 GB/s; two GPUs share a NIC of 12.5 GB/s"),
    "dgx-a100": Preset(same("dgx-a100", switched_box(8, 300), 25), (1,),
                       "nodes: 8 A100, NVSwitches at 300 GB/s, a NIC of 25 GB/s for each GPU"),
    "dgx-h100": Preset(same("dgx-h100", switched_box(8, 450), 50), (1,),
                       "nodes: 8 H100, NVSwitches at 450 GB/s, a NIC of 50 GB/s for each GPU"),
    "nvl72": Preset(same("nvl72", switched_box(72, 900), 50), (1,),
                    "racks: 72 B200, NVSwitches at 900 GB/s, a NIC of 50 GB/s for each GPU"),
    "mi250": Preset(same("mi250", wired_box(16, MI250_XGMI, 50, _XGMI_S), 16), (1,),
                    "nodes: 16 dies of 8 MI250, xGMI links at 50 GB/s, 16 GB/s of network for each die"),
    "amd-z52": Preset(z52, (), "Gigabyte Z52, 8 MI50 in a ring"),
    "unlike": Preset(unlike, (2,), "nodes: one DGX H100, the others DGX A100"),
    "ring": Preset(lambda n: ring(n, _LINK, 1e-6), (8,), "ranks"),
    "mesh": Preset(lambda *dims: grid(dims, _LINK, 1e-6), (4, 4), "ranks along each dimension"),
    "torus": Preset(lambda *dims: grid(dims, _LINK, 1e-6, wrap=True), (4, 4), "ranks along each dimension"),
    "complete": Preset(lambda n: complete(n, _LINK, 1e-6), (8,), "ranks, each with a link to every other"),
    "star": Preset(lambda n: star(n, _LINK, 1e-6), (8,), "ranks around one switch"),
    "fat-tree": Preset(lambda leaves, ranks, over=2: fat_tree(leaves, ranks, _LINK, 1e-6, over), (4, 4, 2),
                       "leaves, ranks of each, and how many times its uplink is oversubscribed"),
    "dragonfly": Preset(lambda groups, routers, ranks: dragonfly(groups, routers, ranks, _LINK, 1e-6), (3, 2, 2),
                        "groups, routers of each, and ranks of each router"),
}  # fmt: skip
"""Networks of shapes alone have links of 50 GB/s and 1 µs."""


def preset_topology(text: str) -> Topology:
    """Return the preset of a name and its numbers, such as "dgx1", "mi250:2", "torus:4x4" or "fat-tree:4x8x2".

    Raises:
        ClusterError: an unknown name, or numbers that the preset does not take.
    """
    name, _, given = text.partition(":")
    if name not in PRESETS:
        raise ClusterError(f"topology {text!r}: unknown name {name!r}; choose one of {', '.join(PRESETS)}")
    preset = PRESETS[name]
    numbers = _numbers(text, given) if given else preset.default
    takes_any = name in ("mesh", "torus")
    if len(numbers) != len(preset.default) and not (takes_any and numbers):
        example = f"{name}:{'x'.join(map(str, preset.default))}" if preset.default else name
        raise ClusterError(
            f"topology {text!r}: expected {len(preset.default)} numbers, got {len(numbers)}; say {example}"
        )
    if prod(numbers) > MOST_NODES:
        raise ClusterError(
            f"topology {text!r}: expected at most {MOST_NODES} nodes, got {prod(numbers)}; take a part of it"
        )
    return preset.make(*numbers)


def _numbers(text: str, given: str) -> tuple[int, ...]:
    parts = given.split("x")
    if not all(part.isascii() and part.isdigit() and 0 < len(part) <= 6 for part in parts):
        raise ClusterError(f"topology {text!r}: expected numbers such as 4x4, got {given!r}; correct them")
    return tuple(checks.positive_int(int(part), f"topology {text!r}", "size", "a number of units") for part in parts)
