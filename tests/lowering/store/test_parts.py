"""What a user does to a compiled model and its parts works, or is an error that says what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from shardwright.lowering import private
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.errors import ShardwrightError
from tests.lowering.runs import Case, entry_of, whole
from tests.lowering.test_microbatches import planned
from tests.lowering.test_training import DATA, FUSED, MEGATRON, TWO, ZERO3, Net


@pytest.fixture(scope="module")
def net() -> Case:
    torch.manual_seed(0)
    return Case(Net().double().eval(), {"ids": torch.randint(20, (8, 12)), "labels": torch.randint(20, (8, 12))})


def steps(net: Case, parallel: ParallelModule) -> list[Callable[[], object]]:
    return [lambda: parallel.forward_backward(**net.batch), lambda: parallel(**net.batch).backward()]


def test_parameters_may_be_frozen_afterwards_and_not_thawed(net: Case) -> None:
    """An optimizer leaves what is frozen, as it gets no gradient; all others are as before."""
    model = copy.deepcopy(net.model)
    model.get_parameter("norm.weight").requires_grad_(False)
    frozen = Case(model, net.batch)

    def body(parallel: ParallelModule) -> None:
        parallel.forward_backward(**net.batch)
        expected = {name: whole(p.grad).clone() for name, p in parallel.named_parameters() if p.grad is not None}
        for module in (parallel.up, parallel.tok):
            module.requires_grad_(False)
        before = {name: whole(p).clone() for name, p in parallel.named_parameters()}
        for step in steps(net, parallel):
            parallel.zero_grad()
            step()
            for name, p in parallel.named_parameters():
                if name.startswith(("up.", "tok.", "head.")):
                    assert p.grad is None, name
                else:
                    assert p.grad is not None
                    torch.testing.assert_close(whole(p.grad), expected[name])
        torch.optim.AdamW(parallel.parameters()).step()
        assert torch.equal(whole(parallel.get_parameter("up.bias")), before["up.bias"])
        assert not torch.equal(whole(parallel.get_parameter("down.bias")), before["down.bias"])
        parallel.requires_grad_(True)
        parallel.forward_backward(**net.batch)
        assert parallel.get_parameter("up.bias").grad is not None

    def thaw() -> None:
        parallel = frozen.lower(frozen.graph(TWO, DATA, data_axes=(0,)))
        parallel.requires_grad_(True)
        for step in steps(net, parallel):
            with pytest.raises(
                ShardwrightError, match=r"norm.weight was captured with requires_grad=False.*compile aga"
            ):
                step()

    for storage in (DATA, DATA | ZERO3, MEGATRON | FUSED):
        net.on_ranks(net.graph(TWO, storage, data_axes=(0,) if "ids" in storage else ()), body)
    run_ranks(thaw, 2, 30)


def hooked(module: nn.Module, found: list[tuple[str, Tensor]]) -> None:
    """Halves one gradient, notes all gradients, and what has been accumulated of one."""
    for name, p in module.named_parameters():
        p.register_hook(lambda g, name=name: found.append((name, whole(g).clone())))
    up = module.get_parameter("up.weight")
    up.register_hook(lambda g: g * 0.5)
    up.register_post_accumulate_grad_hook(lambda p: found.append(("accumulated", whole(p.grad).clone())))
    removed = module.get_parameter("down.weight").register_hook(lambda g: g * 100)
    removed.remove()


def test_hooks_on_parameters_are_called_with_what_one_process_gives_them(net: Case) -> None:
    model, expected = copy.deepcopy(net.model), list[tuple[str, Tensor]]()
    hooked(model, expected)
    for _ in range(2):  # gradients accumulate
        model(**net.batch).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert len(expected) == 2 * (len(gradients) + 1)

    def body(parallel: ParallelModule) -> None:
        found: list[tuple[str, Tensor]] = []
        hooked(parallel, found)
        for step in steps(net, parallel):
            step()
        assert len(found) == len(expected)
        for half in (slice(0, len(found) // 2), slice(len(found) // 2, None)):
            torch.testing.assert_close(dict(found[half]), dict(expected[half]))
        for name, p in parallel.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(whole(p.grad), gradients[name])

    for storage in (DATA, DATA | ZERO3, MEGATRON | FUSED):
        net.on_ranks(net.graph(TWO, storage, data_axes=(0,) if "ids" in storage else ()), body)


def test_an_optimizer_may_step_in_a_hook_and_a_hooks_result_is_checked() -> None:
    """Under microbatches too, where a step's gradient comes once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).square().mean()

    found = Case(Square(), {"x": torch.randn(8, 4)})

    def train(module: Any) -> list[Tensor]:
        optimizers = {p: torch.optim.SGD([p], 0.1) for p in module.parameters()}

        def step(p: Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in module.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            module(**found.batch).backward()
        return [whole(p).detach() for p in module.parameters()]

    expected = train(copy.deepcopy(found.model))

    def body(parallel: ParallelModule) -> None:
        torch.testing.assert_close(train(parallel), expected)
        for wrong, message in ((lambda g: g.full_tensor(), "a plain tensor"), (lambda g: 3, "a int")):
            handle = parallel.get_parameter("body.0.bias").register_hook(wrong)
            with pytest.raises(
                ShardwrightError, match=rf"body.0.bias: a hook returned {message}.*expected a DTensor \[4\]"
            ):
                parallel.forward_backward(**found.batch)
            handle.remove()

    found.on_ranks(planned(found, ("data",), many=2), body)


def test_what_would_do_nothing_is_refused(net: Case) -> None:
    buffered = nn.Module()
    graph = net.graph(TWO, {})

    def set_to(module: nn.Module, name: str, value: object) -> Callable[[], None]:
        return lambda: setattr(module, name, value)

    def body(parallel: ParallelModule) -> None:
        up, new = parallel.get_submodule("up"), nn.Parameter(torch.zeros(1))
        hooks = [name for name in dir(up) if name.startswith("register_") and name.endswith("_hook")]
        refused = [name for name in hooks if "state_dict" not in name]
        assert len(refused) == 5
        calls = {(lambda name=name: getattr(up, name)(print)): "up: a .*hook would never be called" for name in refused}
        calls |= {
            lambda: up(torch.zeros(1)): "up: only the whole compiled model can be called",
            up.train: "captured in eval mode",
            up.float: "before compiling it",
            lambda: up.to("meta"): "before compiling it",
            lambda: delattr(up, "weight"): "up: del weight would do nothing",
            lambda: delattr(parallel, "up"): "the compiled model: del up would do nothing",
            set_to(
                parallel.get_submodule("drop"), "p", 0.5
            ): r"drop: p = ... would do nothing.*do it to the model before",
            set_to(up, "weight", new): "up: weight = ... would do nothing.*copy into it, under torch.no_grad",
            set_to(up, "bias", None): "up: bias = ... would do nothing",
            set_to(parallel, "up", nn.Linear(2, 2)): "the compiled model: up = ... would do nothing",
            set_to(parallel, "other", buffered): "the compiled model: other = ...",
            set_to(parallel, "temperature", 3.0): "the compiled model: temperature = ...",
            set_to(parallel, "training", True): "the compiled model: training = ...",
            set_to(up, "training", True): "up: training = ...",
            lambda: parallel.register_buffer("x", new): r"register_buffer\('x'\)",
            lambda: parallel.register_parameter("x", new): r"register_parameter\('x'\)",
            lambda: parallel.add_module("x", buffered): r"add_module\('x'\)",
            lambda: up.register_module("x", buffered): r"up: register_module\('x'\)",
            lambda: parallel.apply(print): r"apply\(...\) would do nothing.*go through named_parameters",
            lambda: nn.utils.parametrizations.weight_norm(up): "up: ",
        }
        for root in (parallel, up):
            for kind in ("pre", "post"):
                name = f"register_load_state_dict_{kind}_hook"
                calls[lambda root=root, name=name: getattr(root, name)(print)] = rf"{name}\(...\) would do nothing"
        for call, message in calls.items():
            with pytest.raises(ShardwrightError, match=message):
                call()
        parallel.note = "the user's own"
        setattr(up, "_note", "as libraries do")  # noqa: B010

    tempered = copy.deepcopy(net.model)
    setattr(tempered, "temperature", 2.0)  # noqa: B010
    known = Case(tempered, net.batch, net.captured)
    known.on_ranks(graph, body)


def test_lists_of_modules_are_gone_through_as_in_the_model() -> None:
    """As those do who freeze the first blocks."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            self.heads = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})
            self.gaps = nn.ModuleList([None, nn.Linear(4, 4), None])  # pyright: ignore[reportArgumentType]

        def forward(self, x: Tensor) -> Tensor:
            for block in [self.gaps[1], *self.blocks, self.body, self.heads["one"], self.heads["two"]]:
                x = block(x)
            return x.square().mean()

    found = Case(Blocks(), {"x": torch.randn(8, 4)})

    def frozen(module: Any) -> list[str]:
        for block in module.blocks[:2]:
            block.requires_grad_(False)
        module.body[0].bias.requires_grad_(False)
        module.blocks[-1].weight.requires_grad_(False)
        module.heads["two"].requires_grad_(False)
        assert (len(module.blocks), len(module.body), len(module.heads)) == (3, 2, 2)
        assert list(module.heads) == list(module.heads.keys()) == ["one", "two"]
        assert list(module.heads.values()) == [head for _, head in module.heads.items()]
        assert "two" in module.heads
        assert [gap is None for gap in module.gaps] == [True, False, True]
        assert module.gaps[1] is module.get_submodule("gaps.1")
        assert list(module.blocks)[1] is module.blocks[1] is module.get_submodule("blocks.1")
        return [name for name, p in module.named_parameters() if p.requires_grad]

    def body(parallel: ParallelModule) -> None:
        module: Any = parallel
        assert frozen(module) == expected
        assert bool(module.get_submodule("blocks.0"))
        with pytest.raises(IndexError):
            module.blocks[3]
        with pytest.raises(ShardwrightError, match=r"blocks: \[0\] = ... would do nothing"):
            module.blocks[0] = nn.Linear(4, 4)
        with pytest.raises(TypeError, match="not subscriptable"):
            module.blocks[0][0]

    expected = frozen(copy.deepcopy(found.model))
    found.on_ranks(found.graph(TWO, {}), body)


def test_hooks_on_all_modules_are_refused(net: Case) -> None:
    """Those that torch calls for each module of a process."""

    def body(parallel: ParallelModule) -> None:
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, loss: None)
        with pytest.raises(ShardwrightError, match=r"forward_backward does not call the hooks"):
            parallel.forward_backward(**net.batch)
        handle.remove()
        parallel.forward_backward(**net.batch)

    net.on_ranks(net.graph(TWO, {}), body)


def test_hooks_on_the_compiled_model_are_called_by_calling_it(net: Case) -> None:
    def body(parallel: ParallelModule) -> None:
        called: list[str] = []
        parallel.register_forward_pre_hook(lambda module, args, kwargs: called.append("before"), with_kwargs=True)
        parallel.register_forward_hook(lambda module, args, loss: called.append("after"))
        parallel(**net.batch).backward()
        assert called == ["before", "after"]
        with pytest.raises(ShardwrightError, match=r"forward_backward does not call the hooks.*parallel\(\*\*batch\)"):
            parallel.forward_backward(**net.batch)

    net.on_ranks(net.graph(TWO, DATA, data_axes=(0,)), body)


def test_what_changes_parameters_in_place_works(net: Case) -> None:
    """Whatever writes to what users see of a parameter, the program reads it."""

    def body(parallel: ParallelModule) -> None:
        for p in parallel.parameters():
            with torch.no_grad():
                p.mul_(0.5)
            nn.init.constant_(p, 0.25)
            p.data.mul_(2)
            p.data.copy_(p.data * 3)
        for held in entry_of(parallel).store.unique:
            assert torch.equal(held.inside, torch.full_like(held.inside, 1.5)), held.name
            assert private.unwrap(held.outside).data_ptr() == held.inside.data_ptr()
        parallel.forward_backward(**net.batch)
        parallel.zero_grad()
        assert all(p.grad is None for p in parallel.parameters())

    net.on_ranks(net.graph(TWO, MEGATRON), body)


def test_moving_to_where_it_is_changes_nothing(net: Case) -> None:
    """Trainers do it."""

    def body(parallel: ParallelModule) -> None:
        before = {name: p.data_ptr() for name, p in parallel.named_parameters()}
        moves: list[Callable[[], object]] = [
            lambda: parallel.to("cpu"), parallel.cpu, parallel.double, lambda: parallel.to(torch.float64),
            lambda: parallel.up.to("cpu"), lambda: parallel.to("cpu", non_blocking=True),
        ]  # fmt: skip
        for move in moves:
            assert isinstance(move(), nn.Module)
        assert {name: p.data_ptr() for name, p in parallel.named_parameters()} == before
        parallel.forward_backward(**net.batch)
        cannot = (
            r"cannot be moved or cast .*, and this would make [\w.]+, float64 on cpu, {} on {}; move or cast the model"
        )
        for change, kind in ((parallel.float, ("float32", "cpu")), (lambda: parallel.to("meta"), ("float64", "meta"))):
            with pytest.raises(ShardwrightError, match=cannot.format(*kind)):
                change()

    net.on_ranks(net.graph(TWO, DATA | ZERO3, data_axes=(0,)), body)


def test_what_would_run_it_in_parallel_once_more(net: Case) -> None:
    def body(parallel: ParallelModule) -> None:
        assert not hasattr(parallel, "_ddp_params_and_buffers_to_ignore")  # only where DDP asks
        once_more = (
            r"^the compiled model already runs on all ranks by its plan, .*; {}.* would do that a second time, or .*"
        )
        wrappers: dict[str, Callable[[], object]] = {
            r"DistributedDataParallel.*: leave it out .*accelerate: prepare": lambda: DistributedDataParallel(parallel),
            r"DataParallel": parallel._replicate_for_data_parallel,
            r"what makes a DDPParallelModule of it": lambda: replicate(parallel),
        }
        for problem, wrap in wrappers.items():
            name, _, remedy = problem.partition(".*")
            with pytest.raises(ShardwrightError, match=once_more.format(name) + (remedy or "use it as it is")):
                wrap()
        with pytest.raises(ShardwrightError, match=r"would compile what calls .*; call parallel\.compile\("):
            torch.compile(parallel)

    net.on_ranks(net.graph(TWO, DATA | ZERO3, data_axes=(0,)), body)
