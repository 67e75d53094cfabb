"""The reducer by itself: what it launches and when, and that every parameter gets its own gradient's sum.

Collectives are simulated: every other rank has the same gradients, so a sum over an axis is a multiple.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from shardwright.lowering.ranks import movement
from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.runtime import reducer
from shardwright.lowering.runtime.reducer import Reducer, Unit
from shardwright.lowering.store.storage import Held
from shardwright.pcg.step import buckets
from shardwright.pcg.step.buckets import BLOCK_BYTES, BUCKET_BYTES, LARGE_BYTES, Buckets

DP, TP = Axis("dp", 2, 0), Axis("tp", 3, 0)


@dataclass
class Work:
    buffer: Tensor
    size: int
    events: list[str]

    def wait(self) -> None:
        self.events.append("wait")
        self.buffer.mul_(self.size)


@dataclass
class Simulated:
    """Sums over the ranks of an axis happen when they are waited for, as late as they may."""

    launched: list[Tensor] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def all_reduce(self, buffer: Tensor, group: int, async_op: bool) -> Work:
        assert async_op
        assert buffer.is_contiguous()
        self.launched.append(buffer.clone())
        self.events.append("launch")
        return Work(buffer, group, self.events)


class Plain(Held):
    """A parameter that is a plain tensor, on one rank."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    num_wrapped = 0

    def wrap(self, part: Tensor) -> Tensor:
        self.num_wrapped += 1
        assert part.shape == self.inside.shape
        return part

    def accept_gradient(self, part: Tensor, wrapped: Tensor | None = None) -> None:
        if self.outside.grad is None:
            self.outside.grad = self.wrap(part) if wrapped is None else wrapped
        else:
            self.outside.grad.add_(part)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Simulated:
    """Buckets of 64 bytes; gradients of 40 bytes and more are summed by themselves."""
    simulated = Simulated()
    monkeypatch.setattr(movement, "dist", simulated)
    monkeypatch.setattr(reducer, "LARGE_BYTES", 40)
    monkeypatch.setattr(buckets, "LARGE_BYTES", 40)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 64)
    return simulated


def parameter(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Plain:
    outside = nn.Parameter(torch.zeros(shape, dtype=dtype))
    return Plain((name,), (), outside, outside.detach().requires_grad_())


class Member(NamedTuple):
    """A parameter and the axis that its gradient is summed over; None: not at all."""

    held: Plain
    axis: Axis | None


def reducing(members: Sequence[Member], sent: torch.dtype | None = None) -> Reducer:
    """A reducer of gradients that come in this order; what is `sent` is in this dtype, or that of the parameters."""
    units: list[tuple[Axis, list[Plain]]] = []
    open_, axes = Buckets[Plain](), dict[str, Axis]()
    for held, axis in members:
        if axis is not None:
            axes[held.name] = axis
            size = held.inside.numel() * held.inside.element_size()
            if (unit := open_.add(held, (axis.name, held.inside.dtype), size)) is not None:
                units.append((axis, unit))
    units += [(axes[unit[0].name], unit) for unit in open_.rest()]
    typed = (Unit(axis, unit, sent or unit[0].inside.dtype) for axis, unit in units)
    return Reducer(typed, [held for held, _ in members])


def member(held: Plain, axis: Axis | None = DP) -> Member:
    group = axis and Axis(axis.name, axis.size, axis.rank, axis.size)  # type: ignore[arg-type]  # sums are multiples
    return Member(held, group)


def parameters(*names: str, size: int = 4) -> list[Plain]:
    return [parameter(name, size) for name in names]


def backward(reducer_: Reducer, factors: dict[Plain, float], order: Sequence[Plain] = ()) -> None:
    """Gradients of `factor` everywhere; those in `order` come in that order, the others before."""
    loss = sum(factor * held.inside.double().sum() for held, factor in factors.items() if held not in order)
    for held in reversed(order):  # what is multiplied last is differentiated first
        loss = (loss * 1.0) + factors[held] * held.inside.double().sum()
    assert isinstance(loss, Tensor)
    reducer_.watch(get_gradient_edge(loss))
    loss.backward()


def gradients(held: Sequence[Plain]) -> list[float | None]:
    """The gradient of each, which is the same everywhere."""
    found: list[float | None] = []
    for one in held:
        grad = one.outside.grad
        assert one.inside.grad is None, "autograd's gradient was not taken"
        assert grad is None or bool((grad == grad.flatten()[0]).all()), grad
        found.append(None if grad is None else float(grad.flatten()[0]))
    return found


def keyed(held: Sequence[Plain], *factors: float) -> Any:
    return dict(zip(held, factors, strict=True))


def test_every_gradient_is_summed_over_its_own_axis_step_after_step(sums: Simulated) -> None:
    small, large, other, alone = parameter("a", 2, 3), parameter("b", 4, 4), parameter("c", 5), parameter("d", 3)
    every = [small, large, other, alone]
    made = reducing([member(small), member(large), member(other, TP), member(alone, None)])
    for step in (1.0, 2.0, 3.0):
        backward(made, keyed(every, step, 10 * step, 100 * step, 1000 * step))
        assert gradients(every) == [2 * step, 20 * step, 300 * step, 1000 * step]
        for held in every:
            held.outside.grad = None
    assert [len(buffer) for buffer in sums.launched[:3]] == [4, 6, 5]


def test_gradients_that_the_user_keeps_are_added_to_and_not_overwritten(sums: Simulated) -> None:
    every = [*parameters("a", "b"), parameter("c", 16), parameter("d", 3)]
    made = reducing([*(member(held) for held in every[:3]), member(every[3], None)])
    backward(made, keyed(every, 1, 2, 3, 4))
    backward(made, keyed(every, 10, 20, 30, 40))
    assert gradients(every) == [22, 44, 66, 44]
    every[0].outside.grad = None  # one is taken away, its bucket's memory still holds the other
    backward(made, keyed(every, 100, 200, 300, 400))
    assert gradients(every) == [200, 444, 666, 444]


def test_buckets_close_at_their_size(sums: Simulated) -> None:
    """Members of 16 bytes: four make 64, the fifth begins the next; other axes and dtypes have their own."""
    ones, doubles, across = parameters(*"abcde"), [parameter("f", 4, dtype=torch.float64)], parameters("g", "h")
    large = [parameter("i", 10), parameter("j", 9)]  # 40 bytes and 36
    order = [ones[0], large[0], doubles[0], *ones[1:3], across[0], ones[3], large[1], ones[4], across[1]]
    made = reducing([member(held, TP if held in across else DP) for held in order])
    units = ["".join(held.name for held in unit.members) for unit in made.units]
    assert units == ["i", "abcd", "f", "gh", "je"]
    assert [unit.packed for unit in made.units] == [False, True, True, True, True]
    assert [unit.axis.name for unit in made.units] == ["dp", "dp", "dp", "tp", "dp"]
    backward(made, dict.fromkeys(order, 1.0))
    assert gradients(order) == [3.0 if held in across else 2.0 for held in order]
    assert [(len(b), b.dtype) for b in sums.launched] == [
        (10, torch.float32), (16, torch.float32), (4, torch.float64), (8, torch.float32), (13, torch.float32)
    ]  # fmt: skip


def test_sizes_are_those_that_were_measured() -> None:
    """Gradients from 2 MiB are summed in place; buckets of the others close at 25 MiB, as DDP's do, blocks at 128."""
    mib = 2**20
    assert (2 * mib, 25 * mib, 128 * mib) == (LARGE_BYTES, BUCKET_BYTES, BLOCK_BYTES)
    small = [parameter(str(i), mib // 4) for i in range(26)]
    units = reducing([member(parameter("large", mib // 2)), *map(member, small)]).units
    assert [(len(unit.members), unit.packed) for unit in units] == [(1, False), (25, True), (1, True)]


def test_units_are_launched_in_one_order_and_as_soon_as_they_can_be(sums: Simulated) -> None:
    """Ranks may get gradients in different orders; who launched by arrival would sum different buckets."""
    for arrivals, during in (("abc", [1, 2, 3]), ("cab", [0, 1, 3]), ("cba", [0, 0, 3])):
        a, b, c = (parameter(name, size) for name, size in (("a", 16), ("b", 17), ("c", 18)))
        order = [{"a": a, "b": b, "c": c}[name] for name in arrivals]
        made = reducing([member(a), member(b), member(c)])
        sums.launched.clear()
        counts: list[int] = []
        for held in order:
            held.inside.register_post_accumulate_grad_hook(lambda _, c=counts: c.append(len(sums.launched)))
        backward(made, {a: 1, b: 2, c: 3}, order)
        assert [len(buffer) for buffer in sums.launched] == [16, 17, 18]
        assert counts == during
        assert gradients([a, b, c]) == [2, 4, 6]


def test_the_next_step_begins_with_the_first_unit_again(sums: Simulated) -> None:
    a, b = parameter("a", 16), parameter("b", 17)
    made = reducing([member(a), member(b)])
    for _ in range(2):
        sums.launched.clear()
        backward(made, {a: 1, b: 2}, (b, a))
        assert [len(buffer) for buffer in sums.launched] == [16, 17]


def test_parameters_without_a_gradient_count_as_zero_and_get_none(sums: Simulated) -> None:
    """What lay in the bucket before must not reach the other ranks."""
    a, b, c, d = *parameters("a", "b", "c"), parameter("d", 16)
    direct = parameter("e", 2)
    made = reducing([member(a), member(b), member(c), member(d), member(direct, None)])
    backward(made, {a: 1, b: 2, c: 3, d: 4, direct: 5})
    for held in (a, b, c, d, direct):
        held.outside.grad = None
    sums.launched.clear()
    backward(made, {b: 7})
    assert gradients([a, b, c, d, direct]) == [None, 14, None, None, None]
    (bucket,) = sums.launched
    assert bucket.tolist() == [0] * 4 + [7] * 4 + [0] * 4
    backward(made, {d: 9})
    assert gradients([a, b, c, d, direct]) == [None, 14, None, 18, None]


def test_gradients_of_a_backward_that_did_not_end_are_forgotten(sums: Simulated) -> None:
    a, b, c, direct = parameter("a", 16), *parameters("b", "c"), parameter("d", 3)
    made = reducing([member(a), member(b), member(c), member(direct, None)])
    ended: list[str] = []
    made.at_end.append(lambda: ended.append("end"))

    def fail(_: Tensor) -> None:
        raise RuntimeError("out of memory")

    values = {a: 1.0, b: 2.0, direct: 4.0}
    hook = c.inside.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        backward(made, values | {c: 3.0}, (a, b, direct, c))
    hook.remove()
    assert ended == []
    assert a.inside.grad is not None or sums.launched
    sums.launched.clear()
    backward(made, {a: 10, b: 20, c: 30, direct: 40})
    assert gradients([a, b, c, direct]) == [20, 40, 60, 40]
    assert ended == ["end"]
    assert len(sums.launched) == 2


def test_a_loss_without_gradient_is_nothing_to_wait_for(sums: Simulated) -> None:
    made = reducing([member(parameter("a", 4))])
    made.watch()
    assert not sums.launched


def test_gradients_that_do_not_come_from_autograd_are_delivered(sums: Simulated) -> None:
    """Those of a summed parameter join its unit; the others are handed over at once, and added to what is there."""
    a, b, direct = parameter("a", 16), parameter("b", 4), parameter("c", 4)
    made = reducing([member(a), member(b), member(direct, None)])

    def finish() -> None:
        made.deliver(a.inside, torch.full((16,), 5.0))
        made.deliver(direct.inside, torch.full((4,), 7.0))
        assert direct.outside.grad is not None
        direct.outside.grad.add_(1.0)
        made.deliver(direct.inside, torch.full((4,), 1.0))

    made.at_end.append(finish)
    backward(made, {b: 2.0})
    assert gradients([a, b, direct]) == [10, 4, 9]
    assert [len(buffer) for buffer in sums.launched] == [16, 4]


def test_a_delivery_completes_a_unit_and_launches_it(sums: Simulated) -> None:
    a, b = parameters("a", "b")
    made = reducing([member(a), member(b)])
    made.deliver(a.inside, torch.full((4,), 1.0))
    assert not sums.launched
    made.deliver(a.inside, torch.full((4,), 2.0))
    made.deliver(b.inside, torch.full((4,), 4.0))
    assert [buffer.tolist() for buffer in sums.launched] == [[3.0] * 4 + [4.0] * 4]


def test_two_losses_of_one_backward_end_once_and_sum_everything(sums: Simulated) -> None:
    """The second loss reaches a unit that has been launched: it is summed again, with what came later."""
    a, b = parameter("a", 16), parameter("b", 4)
    made = reducing([member(a), member(b)])
    ended: list[str] = []
    made.at_end.append(lambda: ended.append("end"))
    first, second = 2 * a.inside.sum(), 3 * a.inside.sum() + 5 * b.inside.sum()
    made.watch(get_gradient_edge(first))
    made.watch(get_gradient_edge(second))
    torch.autograd.backward([first, second])
    assert gradients([a, b]) == [10, 10]
    assert ended == ["end"]


def test_what_is_delivered_after_its_unit_was_launched_is_summed_too(sums: Simulated) -> None:
    a, b = parameter("a", 16), parameter("b", 4)
    made = reducing([member(a), member(b)])
    made.at_end.append(lambda: made.deliver(a.inside, torch.full((16,), 100.0)))
    backward(made, {a: 1, b: 2})
    assert gradients([a, b]) == [202, 4]
    assert [len(buffer) for buffer in sums.launched] == [16, 4, 16]
    backward(made, {a: 1, b: 2})
    assert gradients([a, b]) == [404, 8]


def test_gradients_of_any_strides_are_summed(sums: Simulated) -> None:
    a = parameter("a", 4, 5)
    made = reducing([member(a)])
    weight = torch.arange(20.0).reshape(5, 4)
    loss = (a.inside.t() * weight).sum()
    made.watch(get_gradient_edge(loss))
    loss.backward()
    assert a.outside.grad is not None
    assert a.outside.grad.equal(2 * weight.t())


def test_a_bucket_keeps_its_memory_and_a_large_gradient_needs_none(sums: Simulated) -> None:
    a, b, large = *parameters("a", "b"), parameter("c", 16)
    made = reducing([member(a), member(b), member(large)])
    assert [unit.home is None for unit in made.units] == [True, False]
    places: list[tuple[int, int]] = []
    for step in range(3):
        backward(made, {a: 1, b: 2, large: 3})
        assert (a.num_wrapped, b.num_wrapped, large.num_wrapped) == (1, 1, step + 1)
        assert a.outside.grad is not None
        assert b.outside.grad is not None
        places.append((a.outside.grad.data_ptr(), b.outside.grad.data_ptr()))
        a.outside.grad = b.outside.grad = large.outside.grad = None
    assert len(set(places)) == 1


def test_all_sums_are_launched_before_the_first_is_waited_for(sums: Simulated) -> None:
    a, b, c = *parameters("a", "b"), parameter("c", 16)
    made = reducing([member(a), member(b), member(c, TP)])
    backward(made, {a: 1, c: 2})  # the bucket waits for b until the end
    assert sums.events == ["launch", "launch", "wait", "wait"]
    assert gradients([a, b, c]) == [2, None, 6]


def test_nothing_of_a_step_is_kept(sums: Simulated) -> None:
    a = parameter("a", 16)
    made = reducing([member(a)])
    backward(made, {a: 1})
    gradient = weakref.ref(a.outside.grad)
    a.outside.grad = None
    assert gradient() is None
