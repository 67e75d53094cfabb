"""Lists of actions as text: what happens in which order, with what is gathered, split, made again or started early."""

from __future__ import annotations

from shardwright.pcg.step.actions import Actions, actions
from shardwright.pcg.step.chunk import Chunk, Stretch
from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.operation import Operation, Region
from shardwright.pcg.step.parameters import Parameter, Slices
from shardwright.pcg.step.verbs import VERBS, Action


def parameter(leaf: str, *, sliced: bool = False, sums: tuple[str, ...] = ()) -> Parameter:
    slices = Slices("dp", 0, 1, copied=True) if sliced else None
    num_bytes, dtype = 16.0, "float32"
    stored = (leaf, leaf, f"h.{leaf}", True, dtype, slices, sums, 4, num_bytes, num_bytes)
    return Parameter(*stored, dtype, dtype, num_bytes, num_bytes, num_bytes)


def product(name: str, x: str, weight: str, *, split_backward: bool = False) -> Operation:
    """`name` = x · weight, which keeps x for the gradient of the weight, and the weight for that of x."""
    return Operation(
        name, (x,), (weight,), saved=(weight,) * (x != "x"), num_bytes=1.0, keeps=(x,),
        gradients=() if x == "x" else (x,), grad=True, split_backward=split_backward,
    )  # fmt: skip


def chain(**facts: bool) -> list[Operation]:
    return [product("a", "x", "u", **facts), product("b", "a", "v", **facts), product("c", "b", "w", **facts)]


def chunk(operations: list[Operation], *parameters: Parameter, times: int = 1) -> Chunk:
    by_leaf = {p.leaf: p for p in parameters}
    return Chunk([(Stretch(tuple(operations), frozenset(by_leaf)), times)], by_leaf)


def text(made: Chunk, own: tuple[tuple[Action, ...], ...]) -> str:
    """Operations and values by name; blocks, uses of parameters and units by number."""

    def word(action: Action) -> str:
        what: object = action.number
        if VERBS[action.verb].counts == "operation":
            what = made.occurrences[action.number].operation.name
        elif VERBS[action.verb].counts == "allocation":
            what = made.allocations[action.number].name
        return f"{action.verb} {what}"

    return ", ".join(word(action) for actions_ in own for action in actions_)


def both(made: Chunk, found: Actions) -> tuple[str, str]:
    return text(made, found.forward), text(made, found.backward)


SLICED = [parameter(leaf, sliced=True) for leaf in "uvw"]


def test_the_next_block_is_gathered_while_one_is_used() -> None:
    made = chunk(chain(), *SLICED)
    assert both(made, actions(made)) == (
        "gather 0, await 0, gather 1, run a, free 0, await 1, gather 2, run b, free 1, await 2, run c",
        (
            "await 2, gather 1, backward c, free 2, scatter 2, await 1, backward b, free 1, deliver 2, scatter 1, "
            "backward a, deliver 1, scatter 0, deliver 0"
        ),
    )


def test_frozen_parameters_are_freed_when_backward_has_read_them_and_give_nothing() -> None:
    frozen = [p._replace(grad=False) for p in SLICED[:2]]
    made = chunk([product("a", "y", "u"), *chain()[1:]], *frozen, SLICED[2])
    assert text(made, actions(made).backward) == (
        "await 2, gather 1, backward c, free 2, scatter 2, await 1, gather 0, backward b, free 1, await 0, backward a, "
        "free 0, deliver 2"
    )


def test_a_block_that_backward_does_not_read_is_freed_in_forward() -> None:
    made = chunk([product("a", "x", "u"), *chain()[1:2], chain()[2]._replace(saved=())], *SLICED)
    forward, backward = both(made, actions(made))
    assert forward.endswith("await 2, run c, free 2")
    assert backward.startswith("backward c, scatter 2, gather 1, await 1, backward b, free 1, deliver 2")


def test_what_is_read_to_be_made_again_is_gathered_for_it() -> None:
    homes = ("h.0", "h.0", "h.2")
    operations = [o._replace(region=Region(h, Fate.KEPT), saved=()) for o, h in zip(chain(), homes, strict=True)]
    operations[1] = operations[1]._replace(keeps=("a", "b"))
    made = chunk(operations, *SLICED)
    assert text(made, actions(made).backward) == (
        "backward c, scatter 2, gather 0, await 0, gather 1, again a, await 1, again b, backward b, free 0, free 1, "
        "deliver 2, scatter 1, backward a, deliver 1, scatter 0, deliver 0"
    )


def test_a_block_is_gathered_anew_where_backward_does_not_follow() -> None:
    made = chunk(chain(), *SLICED)
    forward, backward = both(made, actions(made, hold=False))
    assert forward.endswith("await 2, run c, free 2")
    assert backward.startswith("gather 2, await 2, gather 1, backward c")


def test_late_gathers_wait_for_the_block_before() -> None:
    made = chunk(chain(), *SLICED)
    _, backward = both(made, actions(made, late=True))
    assert backward.startswith("await 2, backward c, free 2, gather 1, scatter 2, await 1, backward b")


def test_without_overlap_nothing_is_gathered_ahead() -> None:
    made = chunk(chain(), *SLICED)
    forward, _ = both(made, actions(made, ahead=False))
    assert forward.startswith("gather 0, await 0, run a, free 0, gather 1, await 1, run b")


def test_a_view_of_a_gathered_parameter_keeps_it_there() -> None:
    late = product("d", "b", "t")._replace(views=("u",), saved=("u",))
    made = chunk([*chain()[:2], late], *SLICED[:2], parameter("t"))
    assert "free" not in text(made, actions(made).forward)


def test_gradients_are_summed_with_their_unit_when_all_of_it_is_there() -> None:
    made = chunk(chain(), *(parameter(leaf, sums=("dp",)) for leaf in "uvw"))
    found = actions(made)
    assert text(made, found.backward) == (
        "backward c, accumulate 2, backward b, accumulate 1, backward a, accumulate 0, reduce 0"
    )
    assert found.units == ((2, 1, 0),)
    assert [a.microbatch for own in found.backward for a in own if a.verb == "reduce"] == ["last"]


def test_slices_of_gradients_are_summed_over_further_axes_when_they_are_delivered() -> None:
    made = chunk(chain(), *(parameter(leaf, sliced=True, sums=("node",)) for leaf in "uvw"))
    found = actions(made)
    assert text(made, found.backward).endswith("deliver 1, scatter 0, deliver 0, reduce 0")
    assert found.units == ((2, 1, 0),)


def test_backward_in_two_parts_makes_the_gradients_of_weights_apart() -> None:
    made = chunk(chain(split_backward=True), *map(parameter, "uvw"))
    assert text(made, actions(made).backward) == (
        "backward c, weights c, accumulate 2, backward b, weights b, accumulate 1, weights a, accumulate 0"
    )
    assert text(made, actions(made, two=True).backward) == (  # `a` gives to its weight alone: autograd does, at once
        "backward c, weights c, accumulate 2, backward b, weights b, accumulate 1, backward a, accumulate 0"
    )


def test_what_is_made_again_runs_before_what_needs_it() -> None:
    operations = [
        o._replace(region=Region(f"h.{i // 2}", Fate.KEPT)) for i, o in enumerate([*chain(), product("d", "c", "t")])
    ]
    made = chunk(operations, *map(parameter, "uvwt"))
    assert text(made, actions(made).backward) == (
        "again c, backward d, accumulate 3, backward c, accumulate 2, again a, backward b, accumulate 1, "
        "backward a, accumulate 0"
    )
    assert [m.fate.value for m in made.allocations] == ["kept", "again", "kept", "again", "not needed"]


def test_a_sum_of_the_batch_is_started_early_and_waited_for_by_its_reader() -> None:
    count = Operation("n", ("x",), verb="start")
    last = product("c", "b", "w")._replace(reads=("b", "n"))
    made = chunk([count, *chain()[:2], last], *map(parameter, "uvw"))
    assert text(made, actions(made).forward) == "start n, run a, run b, wait n, run c"


def test_masks_are_drawn_in_the_order_of_one_process_and_a_shared_one_once() -> None:
    """`b` runs before `a`, which one process has drawn first; `c` and `d` share a mask."""
    names = {"b": 1, "a": 0, "c": 2, "d": 2}
    dropouts = [product(n, "x", "u")._replace(seed=seed) for n, seed in names.items()]
    made = chunk(dropouts, parameter("u"))
    assert text(made, actions(made).forward) == "draw a, run b, run a, draw c, run c, run d"
    in_order = chunk([o._replace(seed=place) for place, o in enumerate(dropouts)], parameter("u"))
    assert text(in_order, actions(in_order).forward) == "run b, run a, run c, run d"


def away(operations: list[Operation]) -> list[Operation]:
    """The same, with results that wait on the host if backward needs them."""
    return [o._replace(stored=Fate.HOST) for o in operations]


def test_what_is_kept_leaves_when_it_is_made_and_comes_back_while_the_block_before_runs() -> None:
    """But for what comes from elsewhere. It is given back when the next block has run."""
    operations = [o._replace(block=f"h.{number}") for number, o in enumerate(chain())]
    made = chunk(away(operations), *map(parameter, "uvw"))
    assert both(made, actions(made)) == (
        "run a, offload a, run b, offload b, release a, run c, release b",
        (
            "fetch b, arrive b, fetch a, backward c, accumulate 2, arrive a, backward b, accumulate 1, "
            "backward a, accumulate 0"
        ),
    )
    assert [m.fate.value for m in made.allocations] == ["kept", "host", "host", "not needed"]


def test_outside_of_blocks_values_go_module_by_module() -> None:
    operations = [o._replace(module=module) for module, o in zip(("up", "up", "down"), chain(), strict=True)]
    made = chunk(away(operations), *map(parameter, "uvw"))
    assert both(made, actions(made)) == (
        "run a, offload a, run b, offload b, run c, release a, release b",
        (
            "fetch b, arrive b, fetch a, backward c, accumulate 2, arrive a, backward b, accumulate 1, "
            "backward a, accumulate 0"
        ),
    )


def test_what_one_block_reads_twice_comes_back_once_and_with_what_it_is_made_again_from() -> None:
    """A block that runs again gives its results away when it has run."""
    first, *rest = chain()
    again = [o._replace(block="h.0", region=Region("h.0", Fate.KEPT)) for o in rest]
    last = [product(name, "c", weight)._replace(module="d") for name, weight in (("d", "t"), ("e", "s"))]
    made = chunk(away([first._replace(block="h"), *again, *last]), *map(parameter, "uvwts"))
    assert both(made, actions(made)) == (
        "run a, offload a, run b, run c, offload c, release a, run d, run e, release c",
        (
            "fetch c, arrive c, fetch a, backward e, accumulate 4, backward d, accumulate 3, arrive a, again b, "
            "backward c, accumulate 2, backward b, accumulate 1, backward a, accumulate 0"
        ),
    )


def test_a_value_leaves_once_nothing_overwrites_it() -> None:
    """A sum over ranks in place."""
    total = Operation("t", ("a",), alias="a", sums_in_place=True, gradients=("a",), grad=True)
    made = chunk(away([*chain()[:1], total, product("b", "t", "v")]), *map(parameter, "uv"))
    assert text(made, actions(made).forward) == "run a, run t, offload a, run b, release a"


def test_three_of_many_equal_stretches_stand_for_all() -> None:
    few, many = (chunk([product("a", "x", "u")._replace(gradients=("x",))], *SLICED[:1], times=n) for n in (3, 99))
    assert both(few, actions(few)) == both(many, actions(many))
    assert [span.more for span in many.spans] == [0, 96, 0]
    assert len(many.blocks) == 3
