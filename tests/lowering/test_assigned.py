"""Buffers that a forward assigns have the values of a single process after every step, under every kind of plan."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.api import compile
from shardwright.cost.clusters.cluster import Cluster
from shardwright.lowering.ranks.launch import run_ranks
from tests.lowering.pipelines import evenly, of_one_stage
from tests.lowering.runs import Case, whole

BATCH = {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}
STEPS = 3


def moved(old: Any, y: Tensor) -> Any:
    return 0.9 * old + 0.1 * y.detach().mean(0)


class Counting(nn.Module):
    """A block that is repeated. Another module has its buffer too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("num_steps", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, y: Tensor) -> Tensor:
        self.num_steps = self.num_steps + 1
        self.mean = moved(self.mean, y)
        return y + torch.tanh(self.inner(y)) / self.num_steps + self.mean


class Assigning(nn.Module):
    """A buffer for every way to move one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 4, dtype=torch.float64), nn.Linear(4, 6, dtype=torch.float64)
        self.blocks = nn.ModuleList([Counting(), Counting()])
        for name in ("plain", "again", "entry", "data", "set", "graded", "first", "early"):
            self.register_buffer(name, torch.zeros(4, dtype=torch.float64), persistent=name != "first")
        self.register_buffer("second", torch.ones(4, dtype=torch.float64))
        self.register_buffer("codes", torch.randn(5, 4, dtype=torch.float64))
        self.register_buffer("num_assigned", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("shared", self.blocks[0].mean)  # pyright: ignore[reportArgumentType]

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x))
        read = (
            self.plain
            + self.again
            + self.entry
            + self.data
            + self.set
            + self.graded.detach()
            + self.first
            + self.shared
        )
        self.early = moved(self.early, y)
        y = y + 0.1 * read + self.early + self.codes[self._nearest(y)]
        self.plain = moved(self.plain, y)
        self.register_buffer("again", moved(self.again, y))
        self._buffers["entry"] = moved(self.entry, y)
        self.data.data = moved(self.data, y)
        setattr(self, "set", moved(self.set, y))  # noqa: B010
        self.graded = 0.5 * self.graded.detach() + y.mean(0)
        self.first, self.second = self.second, moved(self.first, y)
        for block in self.blocks:
            y = block(y)
        self.shared = self.blocks[0].mean
        return (self.down(y) ** 2).mean()

    @torch.no_grad()
    def _nearest(self, y: Tensor) -> Tensor:
        """The codes of y, which move towards it."""
        chosen = (y[:, None] - self.codes).pow(2).sum(-1).argmin(1)
        members = nn.functional.one_hot(chosen, 5).double()
        self.num_assigned = 0.5 * self.num_assigned + members.sum(0)
        self.codes = 0.9 * self.codes + 0.1 * members.T @ y / self.num_assigned.clamp(1)[:, None]
        return chosen


class Remembering(Assigning):
    """The same, with state that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: Tensor | None = None
        self.num_calls, self.temperature = 0, 2.0
        self.plain_tensor = torch.zeros(4, dtype=torch.float64)
        self.pair = (torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
        self.recent = [torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)]
        self.table = {"sum": torch.zeros(4, dtype=torch.float64)}
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x))
        memory = torch.zeros_like(y) if self.memory is None else self.memory
        late = vars(self)["_buffers"]["late"]
        late = torch.ones(4, dtype=torch.float64) if late is None else late
        self.num_calls += 1
        self.temperature *= 0.9
        y = y * self.temperature + 0.5 * memory / self.num_calls + self.recent[0] + self.pair[0] * self.pair[1]
        y = y + 0.1 * (late + self.plain_tensor + self.table["sum"])
        self.memory, self.late = y.detach(), moved(late, y)
        self.plain_tensor.mul_(0.9).add_(y.detach().mean(0))
        self.table["sum"] += y.detach().sum(0)
        self.pair = (moved(self.pair[0], y), 0.5 * self.pair[1])
        self.recent[0], self.recent[1] = self.recent[1], moved(self.recent[0], y)
        return (self.down(y) ** 2).mean() + super().forward(x)


def trained(run: Any, module: nn.Module) -> dict[str, Tensor]:
    """Losses, buffers and parameters of some steps."""
    optimizer, found = torch.optim.SGD(module.parameters(), lr=0.1, foreach=False), dict[str, Tensor]()
    for step in range(STEPS):
        optimizer.zero_grad()
        found[f"loss {step}"] = run(module).detach()
        optimizer.step()
    tensors = (*module.named_buffers(remove_duplicate=False), *module.named_parameters())
    return {**found, **{name: whole(t.detach()).clone() for name, t in tensors}}


def eager_step(model: nn.Module) -> Tensor:
    loss = model(**BATCH)
    loss.backward()
    return loss


def on_rank(plans: list[tuple[type[Assigning], dict[str, Any]]]) -> list[dict[str, Tensor]]:
    compiled = (compile(kind(), Cluster.local(2), kwargs=BATCH, **own) for kind, own in plans)
    return [trained(lambda parallel: parallel.forward_backward(**BATCH), parallel) for parallel in compiled]


def test_what_forward_assigns_moves_as_in_one_process() -> None:
    plans: list[tuple[type[Assigning], dict[str, Any]]] = [
        (Assigning, {"mesh": {"x": 2}, "roles": ["tensor"]}),
        (Assigning, {"mesh": {"x": 2}, "roles": ["zero"], "recompute": "full"}),
        (Remembering, {"mesh": {"x": 2}, "roles": ["data"]}),
    ]
    expected = {kind: trained(eager_step, kind()) for kind in (Assigning, Remembering)}
    for name, value in Remembering().named_buffers():
        assert not value.equal(expected[Remembering][name]), name
    for (kind, plan), found in zip(plans, run_ranks(on_rank, 2, args=(plans,))[0], strict=True):
        for name, value in expected[kind].items():
            assert value.dtype == found[name].dtype, (plan, name)
            assert torch.allclose(found[name], value, rtol=0, atol=1e-11), (plan, name, found[name], value)
        if kind is Remembering:
            eager = Remembering()
            trained(eager_step, eager)
            own: dict[str, Any] = {
                "num_calls": eager.num_calls,
                "temperature": eager.temperature,
                "memory": eager.memory,
            }
            own |= {"recent[1]": eager.recent[1], "pair[0]": eager.pair[0], "table['sum']": eager.table["sum"]}
            for name, value in own.items():
                assert torch.allclose(
                    found[name], torch.as_tensor(value, dtype=found[name].dtype), rtol=0, atol=1e-11
                ), name


class Carrying(Counting):
    """A buffer whose new value has a gradient, another in float32, and state that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graded", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("short", torch.zeros(4))
        self.memory: Tensor | None = None
        self.recent = [torch.zeros(4, dtype=torch.float64)]
        self.num_calls = 0

    def forward(self, y: Tensor) -> Tensor:
        y = (
            y
            + 0.1 * (torch.zeros_like(y) if self.memory is None else self.memory)
            + self.recent[0]
            + self.short.detach()
        )
        self.num_calls += 1
        z = torch.tanh(self.inner(y)) / self.num_calls + 0.1 * self.graded.detach()
        self.graded = 0.5 * self.graded.detach() + z.mean(0)
        self.short = z.mean(0).float()
        self.memory, self.recent[0] = z.detach(), moved(self.recent[0], z)
        return super().forward(y + z)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 4, dtype=torch.float64)
        self.blocks = nn.ModuleList(Carrying() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x))
        for block in self.blocks:
            y = block(y)
        return (y**2).mean()


def test_stages_have_the_state_of_one_process() -> None:
    """Of buffers whose new value has a gradient, which is detached after forward, and of what is no buffer."""
    model = Stack()
    expected = trained(eager_step, model)
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Carrying)
        assert block.memory is not None
        of_block = {"memory": block.memory, "recent[0]": block.recent[0], "num_calls": torch.tensor(block.num_calls)}
        expected |= {f"blocks.{number}.{name}": value for name, value in of_block.items()}
    case = Case(Stack(), BATCH)
    graph = of_one_stage(case, (), 1)
    plans = [(graph, evenly(graph, 2)), (graph, evenly(graph, 2, "gpipe"))]
    body = partial(trained, lambda parallel: parallel.forward_backward(**BATCH))
    for (_, execution), by_rank in zip(plans, case.on_ranks_of(plans, body), strict=True):
        assert {"blocks.0.memory", "blocks.3.graded", "blocks.1.short"} <= set().union(*by_rank) <= expected.keys()
        for name, value in (pair for found in by_rank for pair in found.items()):
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12, msg=f"{execution}, {name}")
        missing = expected.keys() - set().union(*by_rank)
        assert {name.rpartition(".")[2] for name in missing} <= {"num_calls"}, missing  # a number of the program's own
