"""Several programs over one store of parameters: other batches, microbatches, modes; what does not fit is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwright.lowering.module import ParallelModule
from shardwright.lowering.random.exact import seed_exactly
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.lowering.runtime.spec import EntrySpec
from shardwright.lowering.store.sources import own_part
from shardwright.lowering.store.storage import Slices
from shardwright.pcg.capture.capture import find_loss
from shardwright.pcg.errors import BatchError, PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import Layouts, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import DEFAULT, Execution
from tests.lowering.pipelines import evenly, of_one_stage
from tests.lowering.runs import Batch, Case, Step, assert_same_step, outcome, serial_step
from tests.lowering.test_stage_training import case as in_blocks
from tests.lowering.test_training import DATA, MEGATRON, TWO, VOCAB, VOCAB_SPLIT, ZERO3, Net

ROWS = 8


def batch_of(rows: int) -> Batch:
    generator = torch.Generator().manual_seed(rows)
    return {name: torch.randint(VOCAB, (rows, 12), generator=generator) for name in ("ids", "labels")}


@pytest.fixture(scope="module")
def large() -> Case:
    torch.manual_seed(0)
    return Case(Net().double(), batch_of(ROWS))


@pytest.fixture(scope="module")
def small(large: Case) -> Case:
    return Case(large.model, batch_of(4))


def spec(found: Case, graph: Graph, execution: Execution = DEFAULT) -> EntrySpec:
    known = found.captured.constants, found.captured.options
    return EntrySpec(graph, *known, execution, timeout_s=30, training=found.model.training)


def with_entries(model: nn.Module, specs: Sequence[EntrySpec]) -> ParallelModule:
    parallel = ParallelModule(model)
    for one in specs:
        parallel.enter(one)
    return parallel


def steps(model: nn.Module, batches: Sequence[Batch]) -> list[Step]:
    """Of a model or its compiled form, each with an update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    found = list[Step]()
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        with seed_exactly(number):
            if isinstance(model, ParallelModule):
                loss = model.forward_backward(**batch)
            else:
                loss = find_loss(model(**batch))
                assert loss is not None
                loss.backward()
        found.append(copy.deepcopy(outcome(model, loss)))
        optimizer.step()
    return found


STORED: dict[str, tuple[Mapping[str, Layouts], tuple[int, ...]]] = {
    "data": (DATA, (0,)), "zero3": (DATA | ZERO3, (0,)), "tensor": (MEGATRON | VOCAB_SPLIT, ()),
}  # fmt: skip


def test_batches_of_two_sizes_train_as_in_one_process(large: Case, small: Case) -> None:
    """In turn, with the same parameters and optimizer, of which no entry has a copy."""
    batches = [large.batch, small.batch, small.batch, large.batch]
    expected = steps(copy.deepcopy(large.model), batches)

    def body() -> list[list[Step]]:
        found = list[list[Step]]()
        for storage, axes in STORED.values():
            graphs = [one.graph(TWO, dict(storage), data_axes=axes) for one in (large, small)]
            first = ParallelModule(large.model)
            first.enter(spec(large, graphs[0]))
            before = {name: (id(p), p.data_ptr()) for name, p in first.named_parameters()}
            first.enter(spec(small, graphs[1]))
            assert {name: (id(p), p.data_ptr()) for name, p in first.named_parameters()} == before
            found.append(steps(first, batches))
        return found

    for by_storage in run_ranks(body, 2, 120):
        for name, found in zip(STORED, by_storage, strict=True):
            for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                assert_same_step(one, other, 1e-9, f"{name}, step {number}")


def test_entries_may_have_other_numbers_of_microbatches(large: Case, small: Case) -> None:
    batches = [small.batch, large.batch, small.batch]
    expected = steps(copy.deepcopy(large.model), batches)
    graphs = [
        of_one_stage(large, ("data",), 2, "zero-3"), of_one_stage(small, ("data",), 1, "zero-3"),
    ]  # fmt: skip

    def body() -> list[Step]:
        return steps(with_entries(large.model, [spec(large, graphs[0]), spec(small, graphs[1])]), batches)

    for found in run_ranks(body, 2, 120):
        for one, other in zip(found, expected, strict=True):
            assert_same_step(one, other, 1e-9)


def test_entries_in_stages() -> None:
    large, small = in_blocks(), Case(in_blocks().model, {k: v[:4] for k, v in in_blocks().batch.items()})
    batches = [large.batch, small.batch, large.batch]
    expected = steps(copy.deepcopy(large.model), batches)
    graphs = [of_one_stage(one, (), 2) for one in (large, small)]
    specs = [spec(one, graph, evenly(graph, 2)) for one, graph in zip((large, small), graphs, strict=True)]

    def body() -> list[Step]:
        return steps(with_entries(large.model, specs), batches)

    for found in run_ranks(body, 2, 120):
        for one, other in zip(found, expected, strict=True):
            assert one.loss.item() == pytest.approx(other.loss.item(), rel=1e-9)
            for name, gradient in one.gradients.items():
                want = other.gradients[name]
                assert (gradient is None) == (want is None), name
                if gradient is not None and want is not None:
                    torch.testing.assert_close(gradient, want, rtol=1e-7, atol=1e-9)


def test_eval_mode_is_another_entry(large: Case) -> None:
    """Without dropout; a module without such a program stays in its mode."""
    calm = copy.deepcopy(large.model).eval()
    evaluated = Case(calm, large.batch)
    with torch.no_grad():
        expected = calm(**large.batch).item()

    def body() -> tuple[float, list[bool], float]:
        graph = large.graph(TWO, DATA | ZERO3, data_axes=(0,))
        parallel = with_entries(large.model, [spec(large, graph)])
        with pytest.raises(Exception, match="captured in train mode"):
            parallel.eval()
        parallel.enter(spec(evaluated, evaluated.graph(TWO, DATA | ZERO3, data_axes=(0,))))
        modes = [parallel.training, parallel.eval().training, all(not m.training for m in parallel.modules())]
        with torch.no_grad():
            loss = parallel(**large.batch).item()
        torch.manual_seed(0)
        return loss, modes, parallel.train()(**large.batch).item()

    torch.manual_seed(0)
    trained = copy.deepcopy(large.model)(**large.batch).item()
    for loss, modes, after in run_ranks(body, 2, 60):
        assert loss == pytest.approx(expected, rel=1e-11)
        assert modes == [True, False, True]
        assert after == pytest.approx(trained, rel=1e-11)


def test_what_is_done_to_programs_is_done_to_later_ones(large: Case, small: Case) -> None:
    def body() -> list[bool]:
        parallel = with_entries(large.model, [spec(large, large.graph(TWO, DATA, data_axes=(0,)))])
        parallel.compile(backend="eager")
        parallel.enter(spec(small, small.graph(TWO, DATA, data_axes=(0,))))
        return [hasattr(entry.runner.program.forward, "_torchdynamo_orig_callable") for entry in parallel.entries]

    assert run_ranks(body, 2, 60) == [[True, True]] * 2


# ---- which entry ----


def test_a_shard_of_one_batch_may_look_like_another_batch(large: Case, small: Case) -> None:
    """Half of the large batch has the shapes of the small one."""

    def loss(parallel: ParallelModule, batch: Batch, rows: int | None = None) -> float:
        """Of a batch, or of a shard of so many rows."""
        start = 0 if rows is None else rows * parallel.ranks.place
        torch.manual_seed(0)
        return parallel(**{name: x[start:][:rows] for name, x in batch.items()}).item()

    def body() -> list[float]:
        specs = [spec(one, one.graph(TWO, DATA, data_axes=(0,))) for one in (large, small)]
        globally, in_shards = (with_entries(large.model, specs) for _ in range(2))
        with pytest.raises(BatchError, match=r"ids \[4, 12\], .* is a global batch of one program and a shard of ano"):
            loss(globally, small.batch)
        with pytest.raises(BatchError, match=r"ids \[6, 12\], .* fits no program; there are some for ids \[8, 12\]"):
            loss(globally, batch_of(6))
        loss(globally, large.batch)
        loss(in_shards, small.batch, 2)
        return [loss(globally, small.batch), loss(in_shards, large.batch, 4)]

    expected = list[float]()
    for batch in (small.batch, large.batch):
        torch.manual_seed(0)
        expected.append(copy.deepcopy(large.model)(**batch).item())
    for found in run_ranks(body, 2, 60):
        assert found == pytest.approx(expected, rel=1e-11)


# ---- what is refused ----


def refusals(large: Case, small: Case) -> Iterator[tuple[str, Case, Mesh, dict[str, Layouts]]]:
    """The words, and the graph that is entered, by its model, mesh and layouts."""
    frozen, other = copy.deepcopy(small.model), Net().double()
    frozen.get_parameter("up.bias").requires_grad_(False)
    other.up, other.down = nn.Linear(16, 48).double(), nn.Linear(48, 16).double()
    batch, rows = small.batch, {"up.weight": (S(0),), "up.bias": (S(0),)}
    stored = r"up\.weight: the plan wants it as dp: S\(1\), and it is stored as dp: S\(0\), for every shape"
    yield stored, small, TWO, {"up.weight": (S(1),)}
    yield r"down\.weight: the plan wants it as dp: R, and it is stored as dp: S\(1\)", small, TWO, rows
    yield r"the plan is for \[tp=2\], and the parameters lie on \[dp=2\]", small, Mesh.of(tp=2), MEGATRON
    yield r"up\.bias: .* requires_grad=False and computes no gradient of it", Case(frozen, batch), TWO, MEGATRON
    yield r"up\.weight: the plan has shape \[48, 16\], the model \[24, 16\]", Case(other, batch), TWO, MEGATRON
    yield r"parameter or buffer 'net\.tok\.weight' that the model does not", Case(Within().double(), batch), TWO, {}


class Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.net(ids, labels)


def test_an_entry_that_wants_another_store_is_refused(large: Case, small: Case) -> None:
    cases = [(words, spec(found, found.graph(mesh, storage))) for words, found, mesh, storage in refusals(large, small)]

    def body() -> None:
        parallel = with_entries(large.model, [spec(large, large.graph(TWO, MEGATRON))])
        for words, one in cases:
            with pytest.raises(PlanError, match=words):
                parallel.enter(one)
        torch.manual_seed(0)
        parallel.forward_backward(**large.batch)

    run_ranks(body, 2, 60)


def test_an_entry_in_other_stages_is_refused() -> None:
    """A stage would read what another one has, or train it alone."""
    large, small = in_blocks(), Case(in_blocks().model, {k: v[:4] for k, v in in_blocks().batch.items()})
    graphs = [of_one_stage(one, (), 2) for one in (large, small)]
    even = evenly(graphs[0], 2)
    uneven = Execution.of(num_stages=2, split=(even.schedule.split[0] + 1, even.schedule.split[1] - 1))

    def body() -> None:
        parallel = with_entries(large.model, [spec(large, graphs[0], even)])
        with pytest.raises(PlanError, match=r"[\w.]+: the plan reads it in pipeline stages \[0\], and it is stored in"):
            parallel.enter(spec(small, graphs[1], uneven))

    run_ranks(body, 2, 60)


# ---- where values come from ----


class File:
    """Parameters in a file, of which a rank reads its parts; nobody has a whole model."""

    def __init__(self, model: nn.Module, path: Path) -> None:
        self.parameters: Mapping[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.buffers: Mapping[str, Tensor] = {}
        self.state = torch.load(path, mmap=True)

    def agree(self, ranks: Ranks, others: Mapping[str, Tensor]) -> None:
        assert not others

    def parts(self, wanted: Mapping[str, Slices], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        return ((name, own_part(self.state[name], slices, device)) for name, slices in wanted.items())


def test_values_may_come_from_elsewhere_than_the_model(large: Case, tmp_path: Path) -> None:
    """A model on the meta device, whose values are in a file."""
    torch.save(large.model.state_dict(), tmp_path / "weights")
    with torch.device("meta"):
        hollow = Net().double()
    hollow.head.weight = hollow.tok.weight
    graph = large.graph(TWO, DATA | ZERO3, data_axes=(0,))

    def body() -> Step:
        parallel = ParallelModule(hollow, source=File(hollow, tmp_path / "weights"))
        parallel.enter(spec(large, graph))
        torch.manual_seed(7)
        return outcome(parallel, parallel.forward_backward(**large.batch))

    for found in run_ranks(body, 2, 60):
        assert_same_step(found, serial_step(large), 1e-11)
