"""The algorithms of collectives, as closed forms over the links of a group.

An algorithm is a list of steps over links. Its time has two coefficients:

    α  Σ over steps of hops · hop_s
    β  Σ (pipelined: max) over steps of share / bandwidth, where `share` is the part of the tensor that a device sends

**Bytes** S are always those of the full tensor of one group, of n devices:

    all_reduce       every device holds a summand of this size, and afterwards the sum
    all_gather       every device holds 1/n of this size, and afterwards all of it
    reduce_scatter   every device holds a summand of this size; afterwards 1/n of the sum
    all_to_all       the sharded tensor: 1/n of it on every device before and after
    broadcast        one device holds this size, and afterwards every device

With k the split of a link and m the members inside (`groups.py`):

    ring               hops k−1 per chain of the level   share (n−1)/n / m, pipelined: the narrowest level counts
    hierarchical       hops k−1                          share (k−1)/k / m: inside first, then 1/m of the data outside;
                                                         on a grid one dimension after the other, hops Σ (k_d−1)
    halving-doubling   hops log₂ k                       share (k−1)/k / m; powers of two only
    tree               hops k−1 inside, ⌈log₂ k⌉ beyond  share 1/m a direction, pipelined (double binary tree)
    chain              hops k−1 per chain of the level   share 1/m, pipelined: broadcast round a ring
    binomial tree      hops ⌈log₂ k⌉                     share ⌈log₂ k⌉: rounds of the whole tensor
    nvls               hops 1                            share (k+1)/k: the switch sums and copies; a tree beyond
    direct exchange    hops (k−1)·m                      share (k−1)·m / n², all links at once

One pass for all-gather and reduce-scatter, two for all-reduce. On a torus of r dimensions the data is cut
into r parts that take the dimensions in different order, so all links work all the time.
Sources: Thakur et al., "Optimization of Collective Communication Operations in MPICH" (2005); Sanders et al.,
"Two-tree algorithms" (2009); Jain and Sabharwal, "Optimal bucket algorithms for large MPI collectives on torus
interconnects" (2010); NVIDIA/nccl, src/graph/tuning.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, log2, prod

from shardwright.cost.clusters.cluster import Collective
from shardwright.cost.collectives.curve import CostLine
from shardwright.cost.collectives.groups import Link, one_switch

PASSES: dict[Collective, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "all_to_all": 1}


@dataclass(frozen=True, slots=True)
class LinkUse:
    """The use of a link: `hops`, one after the other, and the `share` of the tensor that a device sends."""

    link: Link
    hops: int
    share: Fraction
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Steps one after the other; `pipelined` where all links work at once, so that the slowest counts."""

    name: str
    steps: tuple[LinkUse, ...]
    pipelined: bool

    @property
    def line(self) -> CostLine:
        times = [float(step.share) / step.bytes_per_s for step in self.steps]
        hops_s = sum(step.hops * step.link.hop_s for step in self.steps)
        return CostLine(hops_s, max(times) if self.pipelined else sum(times))


def ring(links: Sequence[Link], passes: int) -> Algorithm:
    """Return the ring: each device passes on to its neighbour; α counts each link that a trip round passes over."""
    n = _size(links)
    share = Fraction(n - 1, n)
    hops = [(link.split - 1) * n // (link.inside * link.split) for link in links]
    return _passes("ring", passes, links, hops, [share / link.inside for link in links], pipelined=True)


def hierarchical(links: Sequence[Link], passes: int) -> Algorithm:
    """Return reduce-scatter inside, all-reduce across, all-gather inside; on a grid, per dimension."""
    hops = [sum(k - 1 for k in link.dims) for link in links]
    return _passes("hierarchical", passes, links, hops, _halved(links), pipelined=False)


def halving_doubling(links: Sequence[Link], passes: int) -> Algorithm:
    """Return recursive halving, then doubling, over groups of a power of two."""
    return _passes("halving-doubling", passes, links, [_log(link) for link in links], _halved(links), pipelined=False)


def tree(links: Sequence[Link], passes: int) -> Algorithm:
    """Return the double binary tree: a chain inside a unit of the first link, binary trees beyond; up and down."""
    hops = [link.split - 1 if link.inside == 1 and link.kind != "network" else _log(link) for link in links]
    return _passes("tree", passes, links, hops, [Fraction(1, link.inside) for link in links], pipelined=True)


def chain(links: Sequence[Link]) -> Algorithm:
    """Return the broadcast in which every device passes on each piece that it receives."""
    hops = [step.hops for step in ring(links, 1).steps]
    return _passes("chain", 1, links, hops, [Fraction(1, link.inside) for link in links], pipelined=True)


def binomial(links: Sequence[Link]) -> Algorithm:
    """Return the broadcast in which each device with the tensor sends it to one without, outermost level first."""
    rounds = [_log(link) for link in links]
    return _passes("binomial tree", 1, links, rounds, [Fraction(r) for r in rounds], pipelined=False)


def nvls(links: Sequence[Link]) -> Algorithm:
    """Return all-reduce in the switch: a device sends its summand, and 1/n of the sum, which the switch copies to all.

    Across nodes, a tree sums the results of the nodes' switches.
    """
    inner, *outer = links
    steps = [LinkUse(inner, 1, Fraction(inner.split + 1, inner.split), inner.bytes_per_s)]
    steps += tree(outer, 2).steps
    return Algorithm("nvls tree" if outer else "nvls", tuple(steps), True)


def direct_exchange(links: Sequence[Link]) -> Algorithm:
    """Return the exchange: a device sends 1/n² of the tensor to every other, over the level that they share."""
    n = _size(links)
    peers = [(link.split - 1) * link.inside for link in links]
    steps = [LinkUse(x, p, Fraction(p, n * n), x.exchange_bytes_per_s) for x, p in zip(links, peers, strict=True)]
    return Algorithm("direct exchange", tuple(steps), True)


def candidates(collective: Collective, links: Sequence[Link]) -> tuple[Algorithm, ...]:
    """Return every algorithm that can run `collective` over `links`."""
    if collective == "all_to_all":
        return (direct_exchange(links),)
    passes = PASSES[collective]
    if collective == "broadcast":
        return chain(links), tree(links, 1), binomial(links)
    forms: list[Callable[[Sequence[Link], int], Algorithm]] = [ring, hierarchical]
    if all(link.split & (link.split - 1) == 0 for link in links):
        forms.append(halving_doubling)
    if collective == "all_reduce":
        forms.append(tree)
    algorithms = tuple(form(links, passes) for form in forms)
    return (*algorithms, nvls(links)) if collective == "all_reduce" and links[0].switched else algorithms


@lru_cache(maxsize=4096)
def on_a_switch(collective: Collective, n: int) -> LinkUse:
    """Return the hops and share of `collective` among n devices of one switch: by a ring, an exchange or a chain."""
    (step,) = candidates(collective, (one_switch(n),))[0].steps
    return step


def _passes(
    name: str, passes: int, links: Sequence[Link], hops: Sequence[int], shares: Sequence[Fraction], pipelined: bool
) -> Algorithm:
    rows = zip(links, hops, shares, strict=True)
    steps = tuple(LinkUse(link, passes * h, passes * share, link.bytes_per_s) for link, h, share in rows)
    return Algorithm(name, steps, pipelined)


def _halved(links: Sequence[Link]) -> list[Fraction]:
    return [Fraction(link.split - 1, link.split * link.inside) for link in links]


def _size(links: Sequence[Link]) -> int:
    return prod(link.split for link in links)


def _log(link: Link) -> int:
    return ceil(log2(link.split))
