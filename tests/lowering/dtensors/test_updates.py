"""A table: every optimizer of torch, and some that are written as others are, trains sharded weights as one process."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.lowering.module import ParallelModule
from shardwright.muon import Muon
from shardwright.pcg.errors import ShardwrightError
from shardwright.pcg.layout import S
from shardwright.pcg.padding.longer import padded
from shardwright.pcg.padding.stretches import Padding, Stretch
from shardwright.pcg.step.execution import DEFAULT
from tests.lowering.runs import Case, whole
from tests.lowering.test_training import FFN, FUSED, HIDDEN, MEGATRON, TWO, Net

BLOCKS = FUSED | {"tok.weight": (S(0),)}
FLATTENING = {"LBFGS", "Summing"}
"""Those that flatten weights, which torch refuses where parts differ."""
Make = Callable[[list[nn.Parameter]], optim.Optimizer]


class Uneven(Net):
    """Two do not divide the hidden units: parts differ, and those of `down.weight` have padding between their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, FFN - 1), nn.Linear(FFN - 1, HIDDEN)


def with_padding(case: Case) -> Case:
    dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    begins = [Padding(name, dim, Stretch(1, FFN - 1, FFN, 1)) for name, dim in dims.items()]
    return Case(case.model, case.batch, replace(case.captured, graph=padded(case.captured.graph, begins)))


class Lamb(optim.Optimizer):
    """Steps are scaled by the ratio of two norms, which stay tensors."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for p in self.param_groups[0]["params"]:
            moment = self.state[p].setdefault("moment", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            norms = p.norm(), moment.norm()
            ratio = torch.where((norms[0] > 0) & (norms[1] > 0), norms[0] / norms[1], torch.ones_like(norms[0]))
            p.add_(moment * ratio, alpha=-self.param_groups[0]["lr"])


class Summing(optim.Optimizer):
    """Numbers of Python, summed over all parameters, say how far to go, as in D-adaptation."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"d": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        group, length, product = self.param_groups[0], 0.0, 0.0
        for p in group["params"]:
            total = self.state[p].setdefault("sum", torch.zeros_like(p))
            product += torch.dot(p.grad.flatten(), total.flatten()).item()
            length += float(total.add_(p.grad, alpha=group["d"]).abs().sum())
        if length > 0 and product != 0:
            group["d"] *= 1 + min(1.0, abs(product) / length)
        for p in group["params"]:
            p.add_(p.grad, alpha=-group["d"])


class Shampoo(optim.Optimizer):
    """Roots of whole matrices, which products of gradients add up to, on both sides of each gradient."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__([p for p in parameters if p.ndim == 2], {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for p in self.param_groups[0]["params"]:
            gradient, sides = p.grad, self.state[p]
            for name, product in (("left", gradient @ gradient.T), ("right", gradient.T @ gradient)):
                sides[name] = sides[name] + product if name in sides else product
            p.sub_(self._root(sides["left"]) @ gradient @ self._root(sides["right"]), alpha=0.1)

    def _root(self, side: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(side)
        return (vectors * (values + 1e-3).pow(-0.25)) @ vectors.T


def forms(kind: Any, *names: str, **options: Any) -> dict[str, Make]:
    return {f"{kind.__name__} {name}": partial(kind, **{name: True} if name else {}, **options) for name in names}


def matrices(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    return optim.Muon([p for p in parameters if p.ndim == 2], 0.01)


def transformers_adafactor(parameters: Iterable[nn.Parameter], **options: Any) -> optim.Optimizer:
    from transformers.optimization import Adafactor  # seconds, which other tests need not wait

    return Adafactor(parameters, **options)


OPTIMIZERS: dict[str, Make] = {
    **forms(optim.Adam, "amsgrad", "fused", lr=0.01, weight_decay=0.1),
    **forms(optim.AdamW, "foreach", "fused", "maximize", lr=0.01),
    **forms(optim.SGD, "nesterov", "fused", lr=0.1, momentum=0.9),
    **forms(optim.Adagrad, "", "fused", lr=0.1),
    **forms(optim.RMSprop, "centered", "foreach", lr=0.01, momentum=0.9),
    **forms(optim.NAdam, "decoupled_weight_decay", lr=0.01, weight_decay=0.1),
    **forms(optim.RAdam, "foreach", lr=0.01),
    **forms(optim.Rprop, "", "foreach"),
    **forms(optim.Adafactor, "", "foreach"),
    **forms(optim.Adadelta, ""),
    **forms(optim.Adamax, ""),
    **forms(optim.ASGD, ""),
    "AdamW of a tensor": partial(optim.AdamW, lr=torch.tensor(0.01, dtype=torch.float64)),
    "transformers.Adafactor": partial(transformers_adafactor, warmup_init=True, weight_decay=0.1, eps=(1e-30, 10.0)),
    "transformers.Adafactor with momentum": partial(
        transformers_adafactor, lr=0.01, relative_step=False, scale_parameter=False, beta1=0.9
    ),
    "Muon": matrices,
    "LBFGS": partial(optim.LBFGS, lr=0.5, max_iter=2, line_search_fn="strong_wolfe"),
    "Lamb": Lamb,
    "Shampoo": Shampoo,
    "Summing": Summing,
}


class OnDTensors(TorchDispatchMode):
    """Collects the operators that are called on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(x, DTensor) for x in tree_leaves((args, kwargs))):
            self.found.add(str(func))
        return func(*args, **(kwargs or {}))


def train(make: Make, module: nn.Module, backward: Callable[[], Tensor]) -> dict[str, Tensor]:
    """The weights after a few steps."""
    optimizer: Any = make(list(module.parameters()))

    def closure() -> Tensor:
        optimizer.zero_grad()
        torch.manual_seed(3)
        return backward()

    for _ in range(1 if isinstance(optimizer, optim.LBFGS) else 2):
        if not isinstance(optimizer, optim.LBFGS):
            closure()
        optimizer.step(closure if isinstance(optimizer, optim.LBFGS) else None)
    return {name: whole(p).detach().clone() for name, p in module.named_parameters()}


def assert_updates_parts(parallel: ParallelModule) -> None:
    """Torch's own functions see no DTensor where all of a parameter has one layout; else torch's rules hold."""
    weight: Any = parallel.get_parameter("tok.weight")
    plain = nn.Parameter(torch.ones(2, dtype=weight.dtype))
    for kind in (optim.AdamW, optim.SGD):
        weight.grad, plain.grad = weight.detach().clone(), plain.detach().clone()
        optimizer, written = kind([weight, plain], lr=0.1, fused=True), weight._version
        optimizer.step()
        assert weight._version > written  # otherwise autograd would use values that backward does not have any more
        with OnDTensors() as seen:
            optimizer.step()
        assert not seen.found, seen.found
        assert all(state.keys() for state in optimizer.state.values())
    other = distribute_tensor(whole(weight).detach(), weight.device_mesh, [Replicate()])
    before = whole(weight).detach().clone()
    weight.grad = other
    with OnDTensors() as seen:
        optim.SGD([weight], lr=0.5).step()
    assert seen.found
    torch.testing.assert_close(whole(weight).detach(), before / 2)


def assert_takes_a_closure(parallel: ParallelModule, backward: Callable[[], Tensor]) -> None:
    """Before the first step there are no gradients, of which states could be made."""
    parallel.zero_grad()
    optimizer: Any = transformers_adafactor(parallel.parameters())
    optimizer.step(torch.enable_grad()(backward))
    assert all(state["step"] == 1 for state in optimizer.state.values())


def assert_takes_lists_by_name() -> None:
    from torch.optim.sgd import sgd  # as it is after the replacement

    weight, gradient = torch.ones(2), torch.ones(2)
    options: dict[str, Any] = dict.fromkeys(("weight_decay", "momentum", "dampening"), 0.0) | {
        "nesterov": False,
        "maximize": False,
    }
    sgd(params=[weight], d_p_list=[gradient], momentum_buffer_list=[None], lr=0.25, **options)
    assert weight.tolist() == [0.75, 0.75]


def assert_makes_states(parallel: ParallelModule) -> None:
    weight: Any = parallel.get_parameter("tok.weight")
    for made in (torch.zeros_like(weight), torch.full_like(weight, 2.0), torch.zeros_like(weight, dtype=torch.int64)):
        assert isinstance(made, DTensor)
        assert (made.placements, made.shape) == (weight.placements, weight.shape)
        assert not made.requires_grad
        meta = made._spec.tensor_meta
        assert (made._spec is weight._spec) == (made.dtype == weight.dtype)  # without torch's rules, which take longer
        assert meta is not None
        assert meta.dtype == made.dtype


def assert_refuses_unequal_placements(parallel: ParallelModule) -> None:
    weight = parallel.get_parameter("tok.weight").detach()
    other = distribute_tensor(whole(weight), weight.device_mesh, [Replicate()])  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ShardwrightError, match=r"_foreach_copy_.*\[20, 16\] with placements .*redistribute it"):
        torch._foreach_copy_([weight], [other])  # pyright: ignore[reportPrivateImportUsage]


def test_every_optimizer_of_torch_is_in_the_table() -> None:
    kinds = {kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)}
    of_sparse_gradients = {optim.SparseAdam}
    listed = {name.split()[0] for name in OPTIMIZERS}
    assert {kind.__name__ for kind in kinds - of_sparse_gradients} - {"Optimizer"} <= listed


def test_optimizers_train_shards_as_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "bfloat16", lambda self: self)  # Muon's products: their rounding depends on the layout
    torch.manual_seed(0)
    case = Case(Uneven().double(), {"ids": torch.randint(20, (8, 12)), "labels": torch.randint(20, (8, 12))})
    start, expected = case.model.state_dict(), dict[str, dict[str, Tensor]]()

    def alone(model: nn.Module) -> Tensor:
        loss = model(**case.batch)
        loss.backward()
        return loss

    for name, make in OPTIMIZERS.items():
        model = copy.deepcopy(case.model)
        expected[name] = train(make, model, partial(alone, model))
        assert max(float((expected[name][key] - start[key]).abs().max()) for key in expected[name]) > 1e-4, name

    def body(parallel: ParallelModule) -> dict[str, str]:
        failures = dict[str, str]()

        def shared(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
            return Muon([p for p in parameters if p.ndim == 2], parallel=parallel, lr=0.01)

        weight: Any = parallel.get_parameter("up.weight")
        is_uneven = not weight.placements[0].is_replicate()
        for name, make in {**OPTIMIZERS, "Muon of matrices that are shared out": shared}.items():
            if (name in FLATTENING) == is_uneven:
                continue
            parallel.load_state_dict(start)
            parallel.zero_grad()
            try:
                found = train(make, parallel, partial(parallel.forward_backward, **case.batch))
                torch.testing.assert_close(found, expected[name.partition(" of matrices")[0]], rtol=1e-6, atol=1e-9)
            except Exception:  # noqa: BLE001 - the others are tried too
                failures[name] = traceback.format_exc()
        assert_refuses_unequal_placements(parallel)
        assert_makes_states(parallel)
        assert_updates_parts(parallel)
        assert_takes_lists_by_name()
        assert_takes_a_closure(parallel, partial(parallel.forward_backward, **case.batch))
        return failures

    plans = [
        (own.graph(TWO, stored), DEFAULT) for own, stored in ((with_padding(case), MEGATRON | BLOCKS), (case, BLOCKS))
    ]
    for failures in chain(*case.on_ranks_of(plans, body)):
        assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())
