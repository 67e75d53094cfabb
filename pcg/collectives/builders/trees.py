"""Trees: sums go up and copies go down, piece after piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwright.pcg.collectives.collective import collective
from shardwright.pcg.collectives.schedule import Schedule, Transfer, in_sequence

Parents = Mapping[int, int]
"""The parent of each rank but the root."""


def binary_tree(num_ranks: int) -> Parents:
    """Return NCCL's tree: a rank's height is the number of zero bits at the end of its number; rank 0 is the root.

    Every odd rank is a leaf, so that the tree of all ranks moved on by one has other leaves.
    """
    parents = dict[int, int]()
    for rank in range(1, num_ranks):
        bit = rank & -rank
        up = (rank ^ bit) | (bit << 1)
        parents[rank] = up if up < num_ranks else rank ^ bit
    return parents


def second_tree(num_ranks: int) -> Parents:
    """Return the other tree of the pair: mirrored for an even number of ranks, else moved on by one."""
    move: Callable[[int], int] = lambda rank: num_ranks - 1 - rank if num_ranks % 2 == 0 else (rank + 1) % num_ranks  # noqa: E731
    return {move(rank): move(parent) for rank, parent in binary_tree(num_ranks).items()}


def tree_broadcast(num_ranks: int, pieces: int = 1, root: int = 0) -> Schedule:
    """Return a binary tree from the root on, piece after piece."""
    tree = {(rank + root) % num_ranks: (up + root) % num_ranks for rank, up in binary_tree(num_ranks).items()}
    whole = collective("broadcast", num_ranks, pieces, root=root)
    return Schedule(f"tree broadcast {num_ranks}", whole, tuple(_down(tree, range(pieces))))


def binomial_gather(num_ranks: int, pieces: int = 1, root: int = 0) -> Schedule:
    """Return a gather over a binomial tree, the nearest first: in ⌈log₂ n⌉ steps."""
    transfers, held = list[Transfer](), {rank: [rank] for rank in range(num_ranks)}
    for step in range((num_ranks - 1).bit_length()):
        for rank in range(1 << step, num_ranks, 2 << step):
            up = rank - (1 << step)
            real, above = (rank + root) % num_ranks, (up + root) % num_ranks
            owners = [(owner + root) % num_ranks for owner in held[rank]]
            transfers += (Transfer(step, real, above, owner * pieces + j) for owner in owners for j in range(pieces))
            held[up] += held[rank]
    whole = collective("gather", num_ranks, pieces, root=root)
    return Schedule(f"binomial gather {num_ranks}", whole, tuple(transfers))


def double_tree_all_reduce(num_ranks: int, pieces: int = 1) -> Schedule:
    """Return the all-reduce of two binary trees, `pieces` in each: up with sums, then down with copies.

    A rank is a leaf of at least one tree, so that it sends and receives about as much as in a ring. Sanders, Speck,
    Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (Parallel Computing 2009).
    """
    trees = (binary_tree(num_ranks), second_tree(num_ranks))
    transfers = list[Transfer]()
    for index, tree in enumerate(trees):
        mine = range(index, 2 * pieces, 2)
        transfers += in_sequence(_up(tree, mine), _down(tree, mine))
    return Schedule(
        f"double tree all_reduce {num_ranks}", collective("all_reduce", num_ranks, 2 * pieces), tuple(transfers)
    )


def _depths(tree: Parents) -> dict[int, int]:
    """Return how far each rank is from the root."""
    depths = dict[int, int]()

    def depth(rank: int) -> int:
        path = list[int]()
        while rank in tree and rank not in depths:
            path.append(rank)
            rank = tree[rank]
        base = depths.setdefault(rank, 0)
        for one in reversed(path):
            base += 1
            depths[one] = base
        return base

    for rank in tree:
        depth(rank)
    return depths


def _down(tree: Parents, pieces: range) -> list[Transfer]:
    depths = _depths(tree)
    return [Transfer(depths[up] + k, up, rank, piece) for rank, up in tree.items() for k, piece in enumerate(pieces)]


def _up(tree: Parents, pieces: range) -> list[Transfer]:
    depths = _depths(tree)
    deepest = max(depths.values(), default=0)
    return [
        Transfer(deepest - depths[rank] + k, rank, up, piece, "reduce")
        for rank, up in tree.items()
        for k, piece in enumerate(pieces)
    ]
