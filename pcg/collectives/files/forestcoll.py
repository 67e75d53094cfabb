"""ForestColl's trees (liangyuRain/ForestColl 3c13aee8): an all-gather as spanning trees.

An `Algo` has a `tree` for each root and index, which takes `nchunks` of the root's data. A tree has a `send` for each
edge; `path` lists the nodes on the way, switches included. Nodes are printed tuples; those that are roots are ranks, in
the order of their names.
"""

from __future__ import annotations

import re
from collections import defaultdict

from shardwright.pcg.collectives.collective import collective, require_at_most
from shardwright.pcg.collectives.files.documents import Element, read_xml
from shardwright.pcg.collectives.schedule import MOST_TRANSFERS, Schedule, Transfer

MOST_CHUNKS = 1 << 16


def read_forest(text: str, source: str = "XML") -> Schedule:
    """Return the all-gather of a file of trees; an edge at depth d of a tree is in step d.

    Raises:
        ScheduleError: naming the line, what was expected, what was found and what to do.
    """
    root = read_xml(text, source)
    trees = list(root.only("tree"))
    if not trees:
        raise root.error("expected trees, got none; is it a file of ForestColl's?")
    ranks = {name: rank for rank, name in enumerate(sorted({tree.text("root") for tree in trees}, key=_order))}
    number = sum(len(tree.children) * tree.number("nchunks", 1, MOST_CHUNKS) for tree in trees)
    require_at_most(source, number, MOST_TRANSFERS, "transfers")
    used, transfers = defaultdict[int, int](int), list[tuple[int, Transfer]]()
    for tree in trees:
        owner, many = ranks[tree.text("root")], tree.number("nchunks", 1, MOST_CHUNKS)
        chunks = range(used[owner], used[owner] + many)
        used[owner] += many
        transfers += ((owner, t) for t in _sends(tree, owner, ranks, chunks))
    pieces = used[0]
    uneven = next((rank for rank in range(len(ranks)) if used[rank] != pieces), None)
    if uneven is not None:
        raise root.error(
            f"expected {pieces} chunks of every root, got {used[uneven]} of the {uneven + 1}th; correct nchunks"
        )
    whole = collective("all_gather", len(ranks), pieces)
    placed = (t._replace(chunk=owner * pieces + t.chunk) for owner, t in transfers)
    return Schedule("forest all_gather", whole, tuple(placed))


def _sends(tree: Element, owner: int, ranks: dict[str, int], chunks: range) -> list[Transfer]:
    depths, transfers = {owner: 0}, list[Transfer]()
    for send in tree.only("send"):
        src, dst = (_rank(send, end, ranks) for end in ("src", "dst"))
        if src not in depths or dst in depths:
            problem = "a sender that the tree has reached, and a receiver that it has not"
            raise send.error(f"expected {problem}, got {src} and {dst}; sort the sends from the root on")
        depths[dst] = depths[src] + 1
        transfers += (Transfer(depths[src], src, dst, chunk) for chunk in chunks)
    missing = next((name for name, rank in ranks.items() if rank not in depths), None)
    if missing is not None:
        raise tree.error(f"expected a tree that reaches every rank, got none to {missing}; add a send")
    return transfers


def _rank(send: Element, end: str, ranks: dict[str, int]) -> int:
    if send.text(end) not in ranks:
        raise send.error(f"{end}: expected a node that is a root, got {send.text(end)[:60]!r}; only roots are ranks")
    return ranks[send.text(end)]


def _order(name: str) -> list[tuple[int, str]]:
    """Return the parts of a name, numbers as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.findall(r"[0-9]{1,9}|[^0-9]+", name)]
