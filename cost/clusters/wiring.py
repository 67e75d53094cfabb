"""The wiring of one machine's GPUs, pair by pair, and the levels of links that follow from it.

    `nvidia-smi topo -m`  ──read_topo──┐
                                       ├──▶ Wiring ──node_levels──▶ levels, and a note where links are left out
    NCCL's topology file  ──read_nccl──┘

Levels are nested groups of consecutive ranks of equal size, from the inside out: GPUs that NVLink joins, GPUs of one
processor, the machine. Groups that are not equal or not consecutive make no level; their pairs count as joined by the
next level outwards. So a wiring is never taken to be faster than it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from shardwright.cost.clusters.presets import GPUS, LINKS, SOCKET_GB_PER_S
from shardwright.cost.clusters.topology import Level, slowest_level
from shardwright.pcg.collectives.files.documents import Element, read_xml
from shardwright.pcg.errors import ClusterError

MOST_GPUS = 1024
"""The most GPUs of one machine. The largest that is sold has 16."""
MOST_NVLINKS = 999
_MOST_DEPTH = 64
_GPU = re.compile(r"GPU([0-9]+)")
_NVLINK = re.compile(r"NV([1-9][0-9]{0,2})")
_PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Paths through one PCIe bridge, several, a processor's host bridge, several of these, both processors."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """The connections of pairs of GPUs, as `nvidia-smi topo -m` names them: "NV12" (12 NVLinks) or one of `_PATHS`.

    `paths[i][j]` is symmetric, and "X" on the diagonal. `network_gb_per_s`: of all network cards together, one way; 0
    if unknown.
    """

    paths: tuple[tuple[str, ...], ...]
    network_gb_per_s: float = 0.0

    @property
    def num_gpus(self) -> int:
        return len(self.paths)

    def nvlinks(self, one: int, other: int) -> int:
        """Return the number of NVLinks that join two GPUs, through switches or not."""
        matched = _NVLINK.fullmatch(self.paths[one][other])
        return int(matched[1]) if matched else 0

    def of(self, gpus: Sequence[int]) -> Wiring:
        """Return the wiring of some of the GPUs, in the order of their ranks."""
        return Wiring(tuple(tuple(self.paths[i][j] for j in gpus) for i in gpus), self.network_gb_per_s)


def read_topo(text: str, source: str) -> Wiring:
    """Return the wiring from the output of `nvidia-smi topo -m`; `source` names it in errors.

    Raises:
        ClusterError: no matrix of GPUs, more of them than a machine has, rows that are missing or cut off, or entries
            that contradict each other.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split() for line in plain.splitlines() if line.strip()]
    matrix = dict[int, list[str]]()
    for name, *row in rows:
        if name.startswith("GPU") and "X" in row and matrix.setdefault(number := _number(name, source), row) != row:
            raise ClusterError(f"{source}: two rows of GPU{number}, which differ; give one matrix")
    if not matrix:
        raise ClusterError(
            f"{source}: no row of a GPU, such as `GPU0  X  NV18`; expected what `nvidia-smi topo -m` prints"
        )
    heads = [word for row in rows for word in row if _GPU.fullmatch(word)]  # of columns too
    size = 1 + max(_number(word, source) for word in heads)
    if sorted(matrix) != list(range(size)):
        raise ClusterError(
            f"{source}: expected rows GPU0 to GPU{size - 1}, got {_numbers(matrix)}; give the whole matrix"
        )
    for index, row in matrix.items():
        if len(row) < size or row[index] != "X":
            raise ClusterError(
                f"{source}: GPU{index}: expected {size} entries with X as number {index}; give the whole matrix"
            )
        for entry in row[:size]:
            if entry != "X" and entry not in _PATHS and not _NVLINK.fullmatch(entry):
                raise ClusterError(
                    f"{source}: GPU{index}: {entry!r} is no connection; expected X, NV and a number, or one of "
                    f"{', '.join(_PATHS)}"
                )
    paths = tuple(tuple(matrix[index][:size]) for index in range(size))
    _check_both_ways(paths, source)
    return Wiring(paths)


def _check_both_ways(paths: Sequence[Sequence[str]], source: str) -> None:
    size = len(paths)
    unlike = next(((i, j) for i in range(size) for j in range(i) if paths[i][j] != paths[j][i]), None)
    if unlike is not None:
        i, j = unlike
        raise ClusterError(
            f"{source}: GPU{i} to GPU{j} is {paths[i][j]} and back {paths[j][i]}; a connection is the same both ways"
        )


def read_nccl(text: str, source: str) -> Wiring:
    """Return the wiring from an NCCL topology file (`NCCL_TOPO_DUMP_FILE` writes one); `source` names it in errors.

    Raises:
        ClusterError: not NCCL's, without GPUs, with a GPU or a link where there can be none, or with a link one way
            only.
        ScheduleError: no plain XML, or a number out of range.
    """
    root = read_xml(text, source, _MOST_DEPTH)
    if root.tag != "system":
        raise ClusterError(f"{source}: expected <system> at the top, got <{root.tag}>; is it NCCL's topology?")
    gpus = _gpus_of(root, source)
    if not gpus:
        raise ClusterError(
            f"{source}: no <gpu> in it; dump the topology of a run that uses all GPUs (NCCL_TOPO_DUMP_FILE)"
        )
    size = len(gpus)
    paths = tuple(tuple("X" if i == j else _path(gpus[i], gpus[j]) for j in range(size)) for i in range(size))
    _check_both_ways(paths, source)
    speeds = [net.number("speed", 0, 10**9, 0) for net in _inside(root, "net")]
    return Wiring(paths, sum(speeds) / 8000)


@dataclass(frozen=True, slots=True)
class _Place:
    """A GPU of NCCL's file: its bus, the elements around it, outermost first, and its NVLinks to each target."""

    bus: str
    above: tuple[Element, ...]
    to_gpus: dict[str, int]
    to_switches: int


def _inside(element: Element, tag: str) -> Iterator[Element]:
    for child in element.children:
        if child.tag == tag:
            yield child
        yield from _inside(child, tag)


def _gpus_of(root: Element, source: str) -> list[_Place]:
    numbered: dict[int, _Place] = {}
    pending: list[tuple[Element, tuple[Element, ...]]] = [(root, ())]
    while pending:
        element, above = pending.pop()
        for child in element.children:
            if child.tag != "gpu":
                pending.append((child, (*above, element)))
                continue
            if element.tag != "pci":
                raise ClusterError(
                    f"{source}: expected a GPU inside of pci, got one inside of {element.tag}; dump it anew"
                )
            number = child.number("dev", 0, MOST_GPUS - 1)
            if number in numbered:
                raise ClusterError(f"{source}: two GPUs have the number {number}; expected the file of one machine")
            numbered[number] = _place(child, element, above)
    if sorted(numbered) != list(range(len(numbered))):
        raise ClusterError(
            f"{source}: GPUs have the numbers {_numbers(numbered)}; expected the file of one machine, dev 0 and on"
        )
    places = [numbered[number] for number in range(len(numbered))]
    _check_buses(places, source)
    return places


def _check_buses(places: Sequence[_Place], source: str) -> None:
    buses = Counter(place.bus for place in places)
    for place in places:
        if buses[place.bus] > 1:
            raise ClusterError(f"{source}: two GPUs at {place.bus or 'no busid'}; expected one at each; dump it anew")
        for target in place.to_gpus:
            if target not in buses:
                raise ClusterError(f"{source}: the GPU at {place.bus} has an NVLink to {target}, where there is none")


def _place(gpu: Element, pci: Element, above: tuple[Element, ...]) -> _Place:
    to_gpus, to_switches = Counter[str](), 0
    for link in _inside(gpu, "nvlink"):
        count, kind = link.number("count", 1, MOST_NVLINKS, 1), link.text("tclass", "").lower()
        if kind.startswith("0x03"):  # a display controller: another GPU
            to_gpus[link.text("target", "").lower()] += count
        elif kind.startswith("0x0680"):  # a bridge: a switch
            to_switches += count
    return _Place(pci.text("busid", "").lower(), above, to_gpus, to_switches)


def _path(one: _Place, other: _Place) -> str:
    if direct := one.to_gpus.get(other.bus, 0):
        return f"NV{direct}"
    if one.to_switches and other.to_switches:
        return f"NV{min(one.to_switches, other.to_switches)}"
    shared = [element for element in one.above if any(element is its for its in other.above)]
    if shared[-1].tag == "pci":
        return "PIX" if shared[-1] is one.above[-1] and shared[-1] is other.above[-1] else "PXB"
    return "PHB" if shared[-1].tag == "cpu" else "SYS"


def _number(name: str, source: str) -> int:
    """Return the number of a GPU with the name `GPU3`."""
    matched = _GPU.fullmatch(name)
    if not matched or len(matched[1]) > len(str(MOST_GPUS)) or int(matched[1]) >= MOST_GPUS:
        raise ClusterError(f"{source}: expected GPU0 to GPU{MOST_GPUS - 1}, got {name[:40]!r}; correct the row")
    return int(matched[1])


def _numbers(given: Collection[int]) -> str:
    """Return numbers for an error, cut short."""
    few = ", ".join(map(str, sorted(given)[:12]))
    return few if len(given) <= 12 else f"{few} and {len(given) - 12} more"


# ---- levels ----


def node_levels(wiring: Wiring, gpu: str) -> tuple[tuple[Level, ...], str]:
    """Return the levels that join a machine's GPUs, all of the kind `gpu` of `GPUS`, and a note on links left out.

    The note is "" where every link counts.
    """
    size, row = wiring.num_gpus, GPUS[gpu]
    joined = groups(size, lambda i, j: wiring.nvlinks(i, j) > 0)
    near = groups(size, lambda i, j: wiring.nvlinks(i, j) > 0 or wiring.paths[i][j] != "SYS")
    inner, note = _nvlink_level(wiring, gpu, joined)
    unit = inner.size if inner else 1
    levels = [inner] if inner else []
    pcie = LINKS[row.link if LINKS[row.link].kind == "pcie" else "pcie"]
    under_one = _block(near, size)
    if under_one > unit and under_one % unit == 0:
        levels.append(pcie.level(under_one // unit, row.host_gb_per_s))
        unit = under_one
    if unit < size:
        between = LINKS["sockets"].level(size // unit, SOCKET_GB_PER_S / unit)
        within = [] if unit == under_one else [pcie.level(size // unit, row.host_gb_per_s)]
        levels.append(slowest_level([between, *within], size // unit))
    return tuple(levels) or (pcie.level(1, row.host_gb_per_s),), note


def groups(size: int, are_joined: Callable[[int, int], bool]) -> list[list[int]]:
    """Return the connected parts of a graph of GPUs, each in order."""
    import networkx as nx

    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(size))
    graph.add_edges_from(pair for pair in combinations(range(size), 2) if are_joined(*pair))
    return [sorted(group) for group in nx.connected_components(graph)]


def _block(groups: Sequence[Sequence[int]], size: int) -> int:
    """Return the size of the groups if they are equal runs of consecutive GPUs, else 1."""
    length = len(groups[0])
    equal = all(list(group) == list(range(group[0], group[0] + length)) for group in groups) and size % length == 0
    return length if equal else 1


def _nvlink_level(wiring: Wiring, gpu: str, groups: Sequence[Sequence[int]]) -> tuple[Level | None, str]:
    """Return the level that NVLink joins, if it joins equal runs of GPUs, and a note on NVLinks that do not count."""
    length = _block(groups, wiring.num_gpus)
    if max(map(len, groups)) == 1:
        return None, ""
    row = GPUS[gpu]
    if not row.nvlinks:
        return None, f"NVLinks left out, as none are known of {gpu}"
    if length == 1:
        order = ",".join(str(i) for group in sorted(groups, key=lambda g: (-len(g), g[0])) for i in group)
        even = len({len(group) for group in groups}) == 1
        return None, "NVLinks left out, as they do not join equal groups of consecutive GPUs" + (
            f"; number them so: CUDA_VISIBLE_DEVICES={order}" if even else ""
        )
    pairs = [[wiring.nvlinks(i, j) for j in group if j != i] for group in groups for i in group]
    least, in_all = min(min(of_one) for of_one in pairs), min(sum(of_one) for of_one in pairs)
    if least > 0 and in_all > row.nvlinks:  # more than a GPU has: the pairs share them, through switches
        return LINKS["nvlink-switch"].level(length, least * row.nvlink_gb_per_s), ""
    kind = "nvlink-mesh" if least > 0 else "nvlink-ring"
    return LINKS[kind].level(length, min(in_all, row.nvlinks) * row.nvlink_gb_per_s), ""
