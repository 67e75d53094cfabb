"""Symmetries of a network: permutations of its ranks that keep all links, rates and shared resources.

A schedule that looks the same from all ranks of an orbit needs to be found for one of them alone. Only groups that move
every rank are used, as they also move every chunk and link. No search is made for symmetries: shifts within equal
parts (TACCL's offsets, NSDI 2023), such as rotations of rings and tori, and flips of bits, such as the mirrors of
grids, are tried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from shardwright.pcg.collectives.collective import Collective
from shardwright.pcg.collectives.topology import Edge, Topology
from shardwright.pcg.errors import ScheduleError

Permutation = tuple[int, ...]
"""The image of each rank."""


def symmetries(topology: Topology, offsets: Iterable[tuple[int, int]] | None = None) -> list[Permutation]:
    """Return a group of symmetries of which none but the identity, the first, leaves a rank where it is.

    `offsets`: (shift, period) pairs that generate the group, where one is asked for: rank r goes to the one `shift`
    after it among the `period` ranks of its part.

    Raises:
        ScheduleError: an offset is no symmetry of the network, or leaves ranks where they are.
    """
    ranks = topology.num_ranks
    generators = [tuple(range(ranks))]
    group = set(generators)
    candidates = _candidates(ranks) if offsets is None else (shifted(ranks, *offset) for offset in offsets)
    for candidate in candidates:
        if candidate in group or len(group) == ranks:
            continue
        grown = _generated([*generators, candidate]) if is_symmetry(topology, candidate) else None
        if grown is not None:
            generators.append(candidate)
            group = grown
        elif offsets is not None:
            problem = f"expected a symmetry that moves all ranks, got {list(candidate)}"
            raise ScheduleError(f"symmetry of {topology.name!r}: {problem}; leave it out")
    return sorted(group)


def shifted(ranks: int, shift: int, period: int) -> Permutation:
    """Return the rotation by `shift` within each part of `period` ranks.

    Raises:
        ScheduleError: parts that do not divide the ranks, or a shift that is none.
    """
    if period < 1 or ranks % period or not 0 < shift < period:
        problem = f"expected a shift below a period that divides {ranks}, got {shift} and {period}"
        raise ScheduleError(f"symmetry: {problem}; choose others")
    return tuple(rank - rank % period + (rank + shift) % period for rank in range(ranks))


def chunk_images(collective: Collective, group: Sequence[Permutation]) -> list[tuple[int, ...]] | None:
    """Return where each permutation takes each chunk; None if the collective has not the group's symmetry.

    Chunks with the same sources, targets and size are taken to their likes in order.
    """
    numbers: dict[tuple[object, ...], list[int]] = defaultdict(list)
    kinds = [(chunk.size, frozenset(chunk.sources), frozenset(chunk.targets)) for chunk in collective.chunks]
    places = list[int]()
    for index, kind in enumerate(kinds):
        places.append(len(numbers[kind]))
        numbers[kind].append(index)
    images = list[tuple[int, ...]]()
    for image in group:
        likes = [numbers.get((size, _moved(image, src), _moved(image, dst))) for size, src, dst in kinds]
        if any(like is None or len(like) <= place for like, place in zip(likes, places, strict=True)):
            return None
        images.append(tuple(like[place] for like, place in zip(likes, places, strict=True) if like))
    return images


def fitting(collective: Collective, group: Sequence[Permutation]) -> Sequence[Permutation]:
    """Return a group if the collective has it, else the identity alone."""
    return group if chunk_images(collective, group) is not None else group[:1]


def is_symmetry(topology: Topology, image: Permutation) -> bool:
    """Return whether a permutation of the ranks, with some permutation of the relays, keeps links and resources."""
    whole = _with_relays(topology, image) if topology.relays else image
    if whole is None:
        return False
    by_edge = topology.by_edge
    for link in topology.links:
        other = by_edge.get((whole[link.src], whole[link.dst]))
        if other is None or (other.rate_bytes_per_s, other.latency_s) != (link.rate_bytes_per_s, link.latency_s):
            return False
    shared = {(one.edges, one.rate_bytes_per_s) for one in topology.resources}
    return {(_moved_edges(whole, edges), rate) for edges, rate in shared} == shared


def _moved(image: Permutation, ranks: Iterable[int]) -> frozenset[int]:
    return frozenset(image[rank] for rank in ranks)


def _moved_edges(image: Sequence[int], edges: Iterable[Edge]) -> frozenset[Edge]:
    return frozenset((image[src], image[dst]) for src, dst in edges)


def _candidates(ranks: int) -> Iterator[Permutation]:
    for period in (part for part in range(2, ranks + 1) if ranks % part == 0):
        yield from (shifted(ranks, shift, period) for shift in range(1, period) if period % shift == 0)
    if ranks & (ranks - 1) == 0:
        yield from (tuple(rank ^ mask for rank in range(ranks)) for mask in range(1, ranks))


def _generated(generators: Sequence[Permutation]) -> set[Permutation] | None:
    """Return the group that permutations generate; None if one besides the identity, the first, leaves a rank alone."""
    group = {generators[0]}
    queue = [generators[0]]
    for one in queue:
        for generator in generators[1:]:
            product = tuple(generator[rank] for rank in one)
            if product in group:
                continue
            if any(rank == image for rank, image in enumerate(product)):
                return None
            group.add(product)
            queue.append(product)
    return group


def _with_relays(topology: Topology, image: Permutation) -> list[int] | None:
    """Extend a permutation to the relays: one goes to another, not taken yet, that has the images of its neighbours."""
    whole = [*image, *[-1] * len(topology.relays)]
    waiting, taken = set(range(topology.num_ranks, topology.num_nodes)), set[int]()
    while waiting:
        ready = [relay for relay in sorted(waiting) if any(whole[n] >= 0 for n in topology.successors[relay])]
        if not ready:
            return None
        for relay in ready:
            known = {whole[node] for node in topology.successors[relay] if whole[node] >= 0}
            likes = (one for one in topology.predecessors[min(known)] if one >= topology.num_ranks and one not in taken)
            fits = next((one for one in likes if known <= set(topology.successors[one])), None)
            if fits is None:
                return None
            whole[relay] = fits
            taken.add(fits)
            waiting.discard(relay)
    return whole
