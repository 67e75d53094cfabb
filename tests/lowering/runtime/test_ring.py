"""Keys that travel around gloo ranks: attention and its gradients are those of one process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import product
from math import prod
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering.private_kernels import fused_attention
from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.runtime.attention import sdpa
from shardwright.lowering.runtime.partial_attention import plain_backward, plain_forward
from shardwright.lowering.runtime.ring_places import Tile, tiles
from shardwright.pcg import slices
from shardwright.pcg.optable import ROWS, LocalShapes
from shardwright.pcg.ring import Rounds
from shardwright.pcg.slices import Sees, Slices
from tests.each import RANDOM_CASES
from tests.lowering.runs import run_all

ERRORS = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
WORLDS = (2, 3, 4)


class Attention(NamedTuple):
    """An attention: shapes of queries, keys and values, and the choices that are no shapes."""

    shapes: tuple[tuple[int, ...], ...]
    causal: bool
    scale: float | None
    dtype: torch.dtype
    trained: tuple[bool, ...]
    by_columns: bool = False
    striped: bool = False
    seen: float = 1.0
    band: tuple[int, int] | None = None

    def inputs(self) -> list[Tensor]:
        """The operands; a fourth is a mask that hides keys. It is added to scores if it has a gradient."""
        generator = torch.Generator().manual_seed(sum(map(sum, self.shapes)))
        exact = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.shapes]
        found = [x.to(self.dtype) for x in exact]
        found = [x.mT.contiguous().mT for x in found] if self.by_columns else found
        for i, trains in enumerate(self.trained[3:], 3):
            visible = torch.rand(self.shapes[i], generator=generator, dtype=torch.float64) < self.seen
            if self.band is not None:
                first, last = self.band
                visible &= torch.ones_like(visible).tril(last).triu(first)
            found[i] = found[i].masked_fill(~visible, float("-inf")) if trains else visible
        return found

    def sees(self, world: int) -> Sees | None:
        """What a ring is told of the band; None: there is none."""
        if self.band is None:
            return None
        first, last = self.band
        return Sees(first, min(last, 0) if self.causal else last, 1 if self.striped else self.shapes[0][-2] // world)

    def seen_by_rank(self, world: int) -> list[list[int]]:
        """How many keys of each rank the queries of each other rank see, counted in the mask."""
        assert self.band is not None
        first, last = self.band
        mask = torch.ones(self.shapes[0][-2], self.shapes[1][-2]).tril(last).triu(first)
        queries, keys = (
            [part(x.unsqueeze(-1), world, rank, striped=self.striped)[:, 0] for rank in range(world)]
            for x in map(torch.arange, mask.shape)
        )
        return [[0 if i == j else int(mask[queries[j]][:, keys[i]].any(0).sum()) for j in range(world)]
                for i in range(world)]  # fmt: skip


def drawn(rng: random.Random, world: int) -> Attention:
    lead = [rng.randint(1, 3) for _ in range(rng.randint(0, 2))]
    heads, shared, width = rng.randint(1, 3), rng.randint(1, 3), rng.choice([4, 8])
    causal, keys = rng.random() < 0.6, world * rng.randint(1, 5)
    queries = keys if causal or rng.random() < 0.5 else world * rng.randint(1, 5)
    values = rng.choice([width, width, 6])
    trained = rng.choice([(True, True, True)] * 3 + [(True, False, False), (False, True, True), (False, False, True)])
    pairs = (*lead, heads * shared, queries, keys)
    mask = tuple(n if rng.random() < 0.7 else 1 for n in pairs)[rng.randint(0, len(pairs) - 2) :]
    masked = rng.random() < 0.5
    return Attention(
        ((*lead, heads * shared, queries, width), (*lead, heads, keys, width), (*lead, heads, keys, values),
         *[mask] * masked),
        causal,
        rng.choice([None, 0.3]),
        rng.choice(list(ERRORS)),
        (*trained, *[rng.random() < 0.5] * masked),
        rng.random() < 0.3,
        queries == keys and rng.random() < 0.5,
        rng.choice([0.2, 0.8]),
    )  # fmt: skip


def part(x: Tensor, size: int, rank: int, *, striped: bool) -> Tensor:
    """What a rank has of a sequence; a mask may have one row for all queries."""
    if x.shape[-2] == 1:
        return x
    return x[..., rank::size, :] if striped else x.chunk(size, -2)[rank]


def put_together(parts: Sequence[Tensor], *, striped: bool) -> Tensor:
    return torch.stack(tuple(parts), -2).flatten(-3, -2) if striped else torch.cat(tuple(parts), -2)


def result_of(case: Attention, inputs: Sequence[Tensor], axis: Axis | None = None) -> list[Tensor | None]:
    """The result and the gradients; with an axis, of its rank's parts, each returned alone."""
    cut = [x if axis is None else part(x, axis.size, axis.rank, striped=case.striped) for x in inputs]
    leaves = [x.clone().requires_grad_(trains) for x, trains in zip(cut, case.trained, strict=True)]
    start = None if axis is None else axis.rank * (1 if case.striped else leaves[0].shape[-2])
    step, sees = axis.size if axis and case.striped else 1, None if axis is None else case.sees(axis.size)
    y = sdpa(case.causal, case.scale, start, *leaves, ring=axis, step=step, sees=sees)
    slopes = torch.sin(torch.arange(y.numel(), dtype=torch.float64)).view_as(y) if axis is None else None
    if axis is not None:
        whole = (*y.shape[:-2], axis.size * y.shape[-2], y.shape[-1])
        slopes = torch.sin(torch.arange(prod(whole), dtype=torch.float64)).view(whole)
        slopes = part(slopes, axis.size, axis.rank, striped=case.striped)
    assert slopes is not None
    y.backward(slopes.to(y.dtype))
    return [y.detach(), *(x.grad for x in leaves)]


def on_rank(case: Attention) -> list[Tensor | None]:
    axis = Axis("cp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    return result_of(case, case.inputs(), axis)


def assert_as_one_process(cases: Sequence[tuple[int, Attention]]) -> None:
    found = run_all([(world, lambda case=case: on_rank(case)) for world, case in cases])
    for (world, case), by_rank in zip(cases, found, strict=True):
        exact = [x if x.dtype == torch.bool else x.double() for x in case.inputs()]
        expected = result_of(case._replace(dtype=torch.float64), exact)
        for name, want, *parts in zip("yqkvm"[: len(expected)], expected, *by_rank, strict=True):
            if want is None:
                assert parts == [None] * world, (name, case)
                continue
            assert {one.dtype for one in parts} == {case.dtype}, (name, case)
            added = name == "m" and want.shape[-2] == 1
            whole = torch.stack(parts).sum(0) if added else put_together(parts, striped=case.striped)
            error = (whole.double() - want).abs().max()
            assert error <= ERRORS[case.dtype] * max(1.0, float(want.abs().max())), (name, case)


def test_it_is_attention_of_one_process() -> None:
    """Of any dtype, number of heads that share keys, width of values, and operands with gradients."""
    rng, number = random.Random(3), RANDOM_CASES or 12
    assert_as_one_process(
        [(world, drawn(rng, world)) for world, _ in zip(WORLDS * number, range(number), strict=False)]
    )


def in_a_band(rng: random.Random, world: int, most: int = 5) -> Attention:
    """Attention in which queries see keys before and after them by a band, by a mask or as it is causal."""
    keys, causal, masked = world * rng.randint(2, most), rng.random() < 0.4, rng.random() < 0.8
    causal |= not masked
    queries, trained = keys if rng.random() < 0.7 else world * rng.randint(1, most), rng.random() < 0.5
    first = -queries if not masked else rng.choice([-queries, -rng.randint(0, keys), rng.randint(-3, 3)])
    last = 0 if not masked else rng.choice([0, 0, rng.randint(-2, 3), rng.randint(0, keys), keys])
    return Attention(
        ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, rng.choice([8, 6])), *[(queries, keys)] * masked), causal,
        None, rng.choice([torch.float64, torch.float64, torch.float32, torch.bfloat16]),
        (*rng.choice([(True, True, True), (True, True, True), (True, False, False), (False, True, False)]),
         *[trained] * masked),
        striped=queries == keys and rng.random() < 0.3, seen=rng.choice([0.5, 1.0]), band=(first, last),
    )  # fmt: skip


def test_ranks_that_see_few_others_compute_and_send_no_more() -> None:
    """Also where a query sees no key at all, where slices are empty, and of unlike numbers of queries."""
    rng, number = random.Random(7), RANDOM_CASES or 16
    worlds = (2, 3, 4, 4)
    assert_as_one_process(
        [(world, in_a_band(rng, world)) for world, _ in zip(worlds * number, range(number), strict=False)]
    )


def test_rows_under_a_band_are_cut_into_tiles() -> None:
    """Tiles of a few queries, of which the kernels see the keys of these alone."""
    rng = random.Random(8)
    with mock.patch.object(slices, "TILE_ROWS", 3):
        assert_as_one_process([(2, in_a_band(rng, 2, most=12)) for _ in range(RANDOM_CASES or 6)])


BANDS = ((-16, 16), (-16, 0), (-5, 0), (-4, 0), (-3, 2), (0, 0), (2, 3), (1, 12))
"""Of 16 queries and keys on 4 ranks."""


def sent_by(case: Attention) -> tuple[list[int], list[int]]:
    """The numbers that a rank sends in each message, forward and backward."""
    axis = Axis("cp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    leaves = [part(x, axis.size, axis.rank, striped=False).requires_grad_(x.is_floating_point()) for x in case.inputs()]
    found = list[list[int]]()
    with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as batches:
        y = sdpa(False, None, axis.rank * 4, *leaves, ring=axis, sees=case.sees(axis.size))
        for run in (lambda: None, lambda: y.sum().backward()):
            run()
            sent = (p.tensor.numel() for call in batches.call_args_list for p in call.args[0] if p.op is dist.isend)
            found.append(sorted(sent))
            batches.reset_mock()
    return found[0], found[1]


def test_slices_and_their_gradients_go_where_they_are_seen_and_no_further() -> None:
    """A key and its value are 16 numbers. Prices know the messages of each rank."""
    shapes = ((1, 1, 16, 8),) * 3 + ((16, 16),)
    cases = [Attention(shapes, False, None, torch.float64, (True, True, True, False), band=band) for band in BANDS]
    for case, by_rank in zip(cases, run_all([(4, partial(sent_by, case)) for case in cases]), strict=True):
        seen, sees = np.array(case.seen_by_rank(4)), case.sees(4)
        assert sees is not None
        priced = Rounds(0, 4, 4 * 16, 4 * 16, 0, 1, (Slices(4, sees, 0, 1, 4, 4),))
        for rank, (forward, backward) in enumerate(by_rank):
            keys, gradients = (sorted(16 * int(n) for n in numbers if n) for numbers in (seen[rank], seen[:, rank]))
            assert (forward, backward) == (keys, sorted(keys + gradients)), (case.band, rank)
            for expected, back in ((forward, False), (backward, True)):
                pairs = priced.messages((rank,), backward=back).listed
                assert sorted(sent for sent, _ in pairs if sent) == expected, (case.band, rank)
        for back in (False, True):
            ranks = [[sent for sent, _ in priced.messages((rank,), backward=back).listed] for rank in range(4)]
            assert [num // 4 for num in priced.sent(backward=back).listed] == np.array(ranks).max(0).tolist(), case.band


def kept_beside(dtype: torch.dtype) -> int:
    """The bytes that a rank keeps for backward beside its operands and its result."""
    axis = Axis("cp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    operands = [torch.randn(2, heads, 6, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    kept = dict[int, int]()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.setdefault(x.untyped_storage().data_ptr(), x.nbytes), lambda x: x
    ):
        y = sdpa(True, None, axis.rank * 6, *operands, ring=axis)
    own = {x.untyped_storage().data_ptr() for x in (*operands, y)}
    return sum(size for place, size in kept.items() if place not in own)


def test_a_rank_keeps_a_number_for_each_query_as_the_plan_counts_it() -> None:
    shapes = LocalShapes.whole(ROWS["sdpa"].signature([(2, 4, 6, 8), *[(2, 2, 6, 8)] * 2], {}))
    jobs = [(2, lambda own=dtype: kept_beside(own)) for dtype in ERRORS]
    for dtype, found in zip(ERRORS, run_all(jobs), strict=True):
        assert found == [ROWS["sdpa"].beside_bytes("log_sum", shapes, str(dtype).removeprefix("torch."))] * 2


def test_queries_that_are_evenly_spaced_see_the_keys_before_them() -> None:
    """Without a ring: a rank has all keys, and every third query; also under a mask of one's own."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 12, 4, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(12, 12) < 0.8
    mask.fill_diagonal_(True)
    for bias in ((), (mask,), (torch.randn(12, 12, dtype=torch.float64),)):
        whole = sdpa(True, None, None, q, k, v, *bias)
        for start in range(3):
            own = sdpa(True, None, start, q[..., start::3, :], k, v, *(x[start::3] for x in bias), step=3)
            torch.testing.assert_close(own, whole[..., start::3, :])


def test_any_strides_and_widths_of_16_bits() -> None:
    """Fused kernels take rows for granted; there is none for values of another width than keys."""
    all_train = (True, True, True)

    def shapes(values: int) -> tuple[tuple[int, ...], ...]:
        return (2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, values)

    strided = [Attention(shapes(8), causal, 0.3, torch.float32, all_train, True) for causal in (False, True)]
    narrow = [Attention(shapes(6), True, None, dtype, all_train) for dtype in (torch.bfloat16, torch.float16)]
    assert_as_one_process([(2, case) for case in (*strided, *narrow)])


def test_masks_that_hide_all_keys_of_a_rank_or_of_a_query() -> None:
    """Each may have a gradient, and one row, column or head for all."""
    shapes = ((4, 8, 4), (2, 8, 4), (2, 8, 4))
    masks: list[tuple[tuple[int, ...], bool]] = [((4, 8, 8), True), ((8, 8), True), ((1, 8), True), ((8, 1), False)]
    given = ((mask, trains, causal) for (mask, trains), causal in zip(masks, (True, False) * 2, strict=True))
    assert_as_one_process([
        (2, Attention((*shapes, mask), causal, 0.3, torch.float64, (True, True, True, trains), False, causal, 0.3))
        for mask, trains, causal in given
    ])  # fmt: skip


def test_scores_of_16_bits_do_not_overflow() -> None:
    q = torch.full((1, 1, 3, 64), 200.0, dtype=torch.float16)
    result, log_sum = plain_forward(q, q, q[..., :8], True, 1e-6)
    assert torch.equal(result.half(), q[..., :8])
    assert log_sum.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_hold_every_pair_that_sees_each_other_once(causal: bool) -> None:
    rng = random.Random(0)
    for _ in range(200):
        queries, (num_keys, last) = range(rng.randint(0, 3), rng.randint(4, 9)), (rng.randint(1, 6), rng.randint(-9, 9))
        seen = np.zeros((queries.stop, num_keys), int)
        for tile in tiles(queries, num_keys, last if causal else None):
            part = seen[tile.queries, tile.keys]
            part += np.tril(np.ones_like(part)) if tile.causal else 1
        expected = [
            [i in queries and (not causal or k <= i + last) for k in range(num_keys)] for i in range(queries.stop)
        ]
        assert np.array_equal(seen, expected), (queries, num_keys, last)


def test_a_whole_block_is_one_tile() -> None:
    """So that one kernel runs where parts of equal size travel, consecutive or striped."""
    after, before_striped, own, before = (list(tiles(range(4), 4, last)) for last in (-4, -1, 0, 4))
    assert (after, before) == ([], [Tile(slice(0, 4), slice(0, 4))])
    assert own == [Tile(slice(0, 4), slice(0, 4), True)]
    assert before_striped == [Tile(slice(1, 4), slice(0, 3), True)]


def test_the_plain_kernel_is_the_fused_one() -> None:
    torch.manual_seed(0)
    for heads, causal in product((1, 2, 6), (False, True)):
        q, k, v = (
            torch.randn(2, 6, 5, 4).double(),
            torch.randn(2, heads, 5, 4).double(),
            torch.randn(2, heads, 5, 4).double(),
        )
        fused = fused_attention(q, v)
        assert fused is not None
        results = [forward(q, k, v, causal, 0.3) for forward in (fused[0], plain_forward)]
        torch.testing.assert_close(*results)
        back = [backward(q, q, k, v, *results[0], causal, 0.3) for backward in (fused[1], plain_backward)]
        torch.testing.assert_close(*map(tuple, back))
