"""TACCL's inputs (microsoft/taccl 426bd1e): a topology of one machine, and a sketch of the schedule that is wanted.

A topology's file names a machine whose links TACCL has built in, and gives costs in µs and µs per MB. Ours takes a
`links` matrix beside them, with the receiver first, for other machines: 1, 2, … chooses a cost of `node_betas_list`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from shardwright.pcg.collectives.files.documents import Node, read_json

MOST_RANKS = 4096
MB = 10**6


@dataclass(frozen=True, slots=True)
class TacclMachine:
    """A machine: the cost of each link, of its NICs, and how many of them there are. Rates in bytes per second."""

    name: str
    num_ranks: int
    num_nics: int
    latency_s: float
    rates: tuple[Fraction, ...]
    nic_latency_s: float
    nic_rate: Fraction
    links: Mapping[tuple[int, int], int]


Senders = Mapping[int, tuple[int, ...]] | str


@dataclass(frozen=True, slots=True)
class Sketch:
    """A user's hints for a synthesis.

    Attributes:
        nodes: how many machines.
        switches: groups of a machine's ranks that send through one switch, and whether few or many links are used.
        senders: for each rank of a machine that sends to others, the ranks of other machines that it sends to; or
            "direct-map", each to its like, or "fully-connected"; None for one machine.
        symmetry: pairs (shift, period): the schedule is the same when every rank moves on by shift within its period.
        pieces: chunks that each rank's data is cut into.
    """

    nodes: int
    strategy: str
    switches: tuple[tuple[tuple[int, ...], str], ...]
    senders: Senders | None
    symmetry: tuple[tuple[int, int], ...]
    pieces: int
    order_kept: bool = False


def read_taccl_machine(text: str, source: str = "topology") -> TacclMachine:
    """Return the machine of a TACCL topology.

    Raises:
        ScheduleError: naming the place, what was expected, what was found and what to do.
    """
    top = read_json(text, source)
    num_ranks = top.get("gpus_per_node").number(1, MOST_RANKS)
    rates = tuple(_rate(beta) for beta in top.get("node_betas_list").items())
    return TacclMachine(
        name=top.get("name").text(),
        num_ranks=num_ranks,
        num_nics=top.get("nics_per_node").number(1, MOST_RANKS),
        latency_s=top.get("alpha").real() / MB,
        rates=rates,
        nic_latency_s=top.get("remote_alpha").real() / MB,
        nic_rate=_rate(top.get("remote_beta")),
        links=_links(top.get("links"), num_ranks, len(rates)) if top.has("links") else {},
    )


def read_sketch(text: str, source: str = "sketch") -> Sketch:
    """Return a TACCL sketch.

    Raises:
        ScheduleError: naming the place, what was expected, what was found and what to do.
    """
    top = read_json(text, source)
    nodes, inside = top.get("nnodes").number(1, MOST_RANKS), top.get("intranode_sketch")
    strategy = inside.get("strategy").one_of(("none", "switch", "minmax", "maxmin"))
    between = top.get("internode_sketch") if top.has("internode_sketch") else None
    if between is not None:
        between.get("strategy").one_of(("relay",))
    pairs = [(pair, pair.numbers(0, 1 << 20)) for pair in top.get("symmetry_offsets").items()]
    for pair, numbers in pairs:
        if len(numbers) != 2 or not 0 < numbers[0] <= numbers[1]:
            raise pair.error(f"expected [shift, period] with 0 < shift ≤ period, got {list(numbers)}; correct it")
    return Sketch(
        nodes=nodes,
        strategy=strategy,
        switches=_switches(inside) if strategy == "switch" else (),
        senders=None if between is None else _senders(between.get("internode_conn")),
        symmetry=tuple((shift, period) for _, (shift, period) in pairs),
        pieces=top.get("hyperparameters").get("input_chunkup").number(1, 1 << 12),
        order_kept=between is not None and between.has("enforce_ordering") and between.get("enforce_ordering").flag(),
    )


def _rate(node: Node) -> Fraction:
    beta = node.real()
    if not beta:
        raise node.error("expected more than 0 µs per MB, got 0; give the cost of the link")
    return MB * MB / Fraction(str(beta))


def _links(node: Node, num_ranks: int, kinds: int) -> dict[tuple[int, int], int]:
    rows = node.items()
    kind_of = dict[tuple[int, int], int]()
    for dst, row in enumerate(rows):
        entries = row.numbers(0, kinds)
        if len(rows) != num_ranks or len(entries) != num_ranks:
            raise row.error(f"expected a matrix of {num_ranks} × {num_ranks}, got {len(rows)} × {len(entries)}")
        kind_of |= {(src, dst): kind for src, kind in enumerate(entries) if kind}
    return kind_of


def _switches(inside: Node) -> tuple[tuple[tuple[int, ...], str], ...]:
    groups = [group.numbers(0, MOST_RANKS) for group in inside.get("switches").items()]
    words = [word.one_of(("uc-min", "uc-max")) for word in inside.get("switch_hyperedge_strategy").items()]
    if len(groups) != len(words):
        raise inside.error(
            f"expected a strategy for each switch, got {len(words)} for {len(groups)}; add or remove some"
        )
    return tuple(zip(groups, words, strict=True))


def _senders(node: Node) -> Senders:
    if isinstance(node.value, str):
        return node.one_of(("direct-map", "fully-connected"))
    receivers_of = dict[int, tuple[int, ...]]()
    for key, receivers in node.fields().items():
        if not (key.isascii() and key.isdecimal() and len(key) < 6):
            raise receivers.error(f"expected the number of a rank, got {key[:40]!r}; correct the key")
        receivers_of[int(key)] = receivers.numbers(0, MOST_RANKS)
    if len({len(receivers) for receivers in receivers_of.values()}) > 1:
        raise node.error("expected as many receivers of each sender, got different numbers; make them equal")
    return receivers_of
