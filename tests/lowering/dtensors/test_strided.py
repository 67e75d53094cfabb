"""A table: what torch's own tools make of parameters in every kind of layout, and of what is derived from them."""

from __future__ import annotations

import copy
import io
import traceback
from collections.abc import Callable, Iterator, Mapping
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from shardwright.lowering.dtensors.strided import is_in_blocks
from shardwright.lowering.module import ParallelModule
from shardwright.pcg.errors import ShardwrightError
from shardwright.pcg.layout import Layouts, R, S
from tests.lowering.runs import Case, whole
from tests.lowering.test_training import GRID, Net

LAYOUTS: dict[str, Layouts] = {
    "tok.weight": (S(0), R),
    "norm.weight": (R, R),
    "qkv.weight": (S(0, 6), S(0, 3)),  # tensor-parallel heads, sharded again by ZeRO
    "qkv.bias": (R, S(0, 3)),
    "up.weight": (S(1), S(0, 4)),
    "up.bias": (S(0, 2), S(0)),
    "down.weight": (S(1, 2), R),
}
FULL = StateDictOptions(full_state_dict=True)
OFFLOADED = StateDictOptions(cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
WHOLE, ROWS = Replicate(), Shard(0)
State = Mapping[str, Any]


class Trained:
    """A compiled model with its first weights and others, and an optimizer after two steps."""

    def __init__(self, parallel: ParallelModule, case: Case, folder: Path) -> None:
        self.parallel, self.case, self._folders = parallel, case, (folder / str(number) for number in count())
        torch.manual_seed(5)
        self.first, self.other = case.model.state_dict(), Net().double().state_dict()
        parallel.load_state_dict(self.first)

    @property
    def named(self) -> dict[str, Any]:
        return {name: p.detach() for name, p in self.parallel.named_parameters()}

    def folder(self) -> Path:
        """A new one, the same on all ranks."""
        return next(self._folders)

    def load_other(self) -> None:
        self.parallel.load_state_dict(self.other)

    def optimizer(self, steps: int = 2) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parallel.parameters(), 0.01, fused=True)
        for _ in range(steps):
            torch.manual_seed(1)
            self.parallel.forward_backward(**self.case.batch)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    def moments(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        found: Any = get_optimizer_state_dict(self.parallel, optimizer)["state"]
        return copied({f"{name} {kind}": found[name][kind] for name in found for kind in ("exp_avg", "exp_avg_sq")})

    def through_files(self, saved: State, loaded: State) -> None:
        """Save one state and load it into the other, of zeros."""
        folder = self.folder()
        save_checkpoint(dict(saved), checkpoint_id=folder)
        for value in loaded.values():
            if isinstance(value, Tensor):
                value.detach().zero_()
        load_checkpoint(dict(loaded), checkpoint_id=folder)


def copied(state: State) -> dict[str, Tensor]:
    return {name: whole(value).detach().clone() for name, value in state.items()}


def assert_same(found: State, expected: State) -> None:
    for name, value in found.items():
        torch.testing.assert_close(whole(value).detach(), expected[name], rtol=0, atol=1e-15, msg=name)


TOOLS: dict[str, Callable[[Trained], None]] = {}


def tool(check: Callable[[Trained], None]) -> Callable[[Trained], None]:
    TOOLS[check.__name__] = check
    return check


@tool
def whole_weights_are_set_on_each_rank(one: Trained) -> None:
    set_model_state_dict(one.parallel, dict(one.other), options=FULL)
    assert_same(one.parallel.state_dict(), one.other)


@tool
def whole_weights_are_broadcast(one: Trained) -> None:
    set_model_state_dict(one.parallel, dict(one.other) if dist.get_rank() == 0 else {}, options=FROM_RANK_0)
    assert_same(one.parallel.state_dict(), one.other)


@tool
def weights_are_got_whole_and_offloaded(one: Trained) -> None:
    assert_same(get_model_state_dict(one.parallel, options=FULL), one.first)
    assert_same(get_model_state_dict(one.parallel, options=OFFLOADED), one.first)
    both = StateDictOptions(full_state_dict=True, cpu_offload=True)
    assert_same(get_model_state_dict(one.parallel, options=both), one.first)


@tool
def state_dict_goes_through_files(one: Trained) -> None:
    one.through_files(one.parallel.state_dict(), one.parallel.state_dict())
    assert_same(one.parallel.state_dict(), one.first)


@tool
def parameters_go_through_files(one: Trained) -> None:
    one.through_files(one.named, one.named)
    assert_same(one.parallel.state_dict(), one.first)


@tool
def files_are_those_of_one_process(one: Trained) -> None:
    found = {name: torch.zeros_like(value) for name, value in one.other.items()}
    one.load_other()
    one.through_files(one.parallel.state_dict(), found)
    assert_same(found, one.other)
    one.parallel.load_state_dict(one.first)
    one.through_files(found | dict(one.other), one.named)
    assert_same(one.named, one.other)


@tool
def offloaded_and_asynchronous_files(one: Trained) -> None:
    one.through_files(get_model_state_dict(one.parallel, options=OFFLOADED), one.named)
    assert_same(one.named, one.first)
    group: Any = dist.new_group(backend="gloo")
    folder, named = one.folder(), one.named
    async_save(named, checkpoint_id=folder, process_group=group).result()  # pyright: ignore[reportAttributeAccessIssue]
    one.load_other()
    load_checkpoint(one.named, checkpoint_id=folder)
    assert_same(one.named, one.first)


@tool
def averages_and_gradients_go_through_files(one: Trained) -> None:
    average = {name: value.clone() for name, value in one.named.items()}
    one.load_other()
    for name, value in one.named.items():
        average[name].lerp_(value, 0.25)
    one.parallel.forward_backward(**one.case.batch)
    gradients = {f"grad {name}": p.grad for name, p in one.parallel.named_parameters()}
    expected = copied(average | gradients)
    assert_same(average, {name: one.first[name].lerp(one.other[name], 0.25) for name in average})
    one.through_files(average | gradients, average | gradients)
    assert_same(average | gradients, expected)
    one.parallel.zero_grad()


@tool
def moments_go_through_files(one: Trained) -> None:
    optimizer = one.optimizer()
    expected, weights = one.moments(optimizer), copied(one.parallel.state_dict())
    other, folder = one.optimizer(steps=0), one.folder()
    model, state = get_state_dict(one.parallel, optimizer)
    save_checkpoint({"model": model, "optimizer": state}, checkpoint_id=folder)
    one.load_other()
    model, state = get_state_dict(one.parallel, other)
    load_checkpoint({"model": model, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(one.parallel, other, model_state_dict=model, optim_state_dict=state)
    assert_same(one.moments(other), expected)
    assert_same(one.parallel.state_dict(), weights)


@tool
def moments_are_set_whole_and_broadcast(one: Trained) -> None:
    optimizer = one.optimizer()
    expected, weights = one.moments(optimizer), copied(one.parallel.state_dict())
    state = copy.deepcopy(get_optimizer_state_dict(one.parallel, optimizer, options=FULL))
    after = list[dict[str, Tensor]]()
    for options in (FULL, FROM_RANK_0):
        given = {} if options is FROM_RANK_0 and dist.get_rank() else copy.deepcopy(state)
        one.parallel.load_state_dict(weights, strict=False)
        other = one.optimizer(steps=0)
        set_optimizer_state_dict(one.parallel, other, given, options=options)
        assert_same(one.moments(other), expected)
        torch.manual_seed(1)
        one.parallel.forward_backward(**one.case.batch)
        other.step()
        one.parallel.zero_grad()
        after.append(copied(one.parallel.state_dict()))
    assert_same(after[1], after[0])


@tool
def torch_saves_and_loads(one: Trained) -> None:
    optimizer, file = one.optimizer(), io.BytesIO()
    expected, weights = one.moments(optimizer), copied(one.parallel.state_dict())
    torch.save({"model": one.parallel.state_dict(), "optimizer": optimizer.state_dict()}, file)
    one.load_other()
    file.seek(0)
    state, other = torch.load(file), one.optimizer(steps=0)
    one.parallel.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    assert_same(one.parallel.state_dict(), weights)
    assert_same(one.moments(other), expected)


def others(one: Trained) -> Iterator[tuple[str, Any, tuple[Placement, ...]]]:
    """Of those in blocks, other placements."""
    for name, value in one.named.items():
        if is_in_blocks(value):
            last = Shard(value.ndim - 1)
            for placements in [(ROWS, WHOLE), (WHOLE, ROWS), (last, ROWS), (WHOLE, last)]:
                yield name, value, placements


@tool
def other_placements_come_and_go(one: Trained) -> None:
    for name, held, placements in others(one):
        mesh, own, part = held.device_mesh, held.placements, held.to_local()
        for value in (held, distribute_tensor(one.first[name], mesh, own), DTensor.from_local(part, mesh, own)):
            there = value.redistribute(placements=placements)
            assert_same({name: there}, one.first)
            assert torch.equal(there.redistribute(placements=own).to_local(), part), (name, placements)


@tool
def operators_take_other_placements(one: Trained) -> None:
    for name, held, placements in others(one):
        held.zero_().add_(distribute_tensor(one.other[name], held.device_mesh, placements))
        assert_same({name: held}, one.other)


@tool
def other_shapes_are_right_or_refused(one: Trained) -> None:
    flat, refused = set[str](), set[str]()
    in_blocks = {name: held for name, held in one.named.items() if is_in_blocks(held)}
    for (name, held), shape in product(in_blocks.items(), ((-1,), (8, -1), (2, 12, -1))):
        try:
            found = whole(held.reshape(shape))
        except RuntimeError as error:
            refused.add(str(error))
            continue
        assert torch.equal(found, one.first[name].reshape(shape)), (name, shape)
        flat |= {name} if shape == (-1,) else set()
    assert {"qkv.weight", "qkv.bias", "up.bias"} <= flat
    assert refused
    assert not [text for text in refused if "lies in blocks" not in text]
    with pytest.raises(RuntimeError, match=r"\[24, 16\] with .* lies in blocks, .* as \[384\] .*x\.full_tensor\(\)"):
        one.named["up.weight"].view(-1)


@tool
def gradients_are_clipped_by_torch(one: Trained) -> None:
    one.parallel.forward_backward(**one.case.batch)
    gradients = [whole(p.grad) for p in one.parallel.parameters() if p.grad is not None]
    expected = torch.stack([gradient.norm() for gradient in gradients]).norm()
    torch.testing.assert_close(whole(nn.utils.clip_grad_norm_(one.parallel.parameters(), 1e-3)), expected)
    one.parallel.zero_grad()


@tool
def files_of_safetensors_are_refused(one: Trained) -> None:
    state = {name: value for name, value in one.parallel.state_dict().items() if name != "head.weight"}
    writer = HuggingFaceStorageWriter(str(one.folder()), save_distributed=True)
    with pytest.raises(CheckpointException, match=r"qkv\.weight: this rank holds it in 3 pieces"):
        save_checkpoint(state, storage_writer=writer)


@tool
def copies_and_pickles_are_refused(one: Trained) -> None:
    for make in (copy.deepcopy, copy.copy, torch.optim.swa_utils.AveragedModel, lambda p: torch.save(p, io.BytesIO())):
        with pytest.raises(ShardwrightError, match=r"for an average keep \{name: p\.detach"):
            make(one.parallel)


def test_torchs_tools_see_every_layout_as_it_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = Case(Net().double(), {"ids": torch.randint(20, (8, 12)), "labels": torch.randint(20, (8, 12))})

    def body(parallel: ParallelModule) -> dict[str, str]:
        failures = dict[str, str]()
        for name, check in TOOLS.items():
            try:
                check(Trained(parallel, case, tmp_path / name))
            except (Exception, CheckpointException):  # noqa: BLE001 - the others are checked too
                failures[name] = traceback.format_exc()
        return failures

    for failures in case.on_ranks(case.graph(GRID, LAYOUTS, data_axes=(0, 1)), body):
        assert not failures, "\n".join(failures.values())
