"""Models that no process holds as a whole: built without memory, or read from files, they train as one that is held."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import functional as F

import shardwright as sw
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.errors import BatchError, DistributedError, PlanError
from tests.each import each, some
from tests.lowering.runs import whole

ROWS, VOCAB, HIDDEN = 6, 12, 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN), nn.LayerNorm(HIDDEN)
        nn.init.trunc_normal_(self.up.weight, std=0.1)
        nn.init.orthogonal_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A tied head, a frozen layer, buffers that files have and have not, a table that is no buffer, dropout."""

    scale: Tensor
    steps: Tensor

    def __init__(self, vocab: int = VOCAB) -> None:
        super().__init__()
        self.tok, self.fixed = nn.Embedding(vocab, HIDDEN, padding_idx=0), nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(HIDDEN, vocab, bias=False)
        self.head.weight = self.tok.weight
        self.fixed.requires_grad_(False)
        self.register_buffer("scale", 1.0 / 10 ** (torch.arange(HIDDEN) / HIDDEN), persistent=False)
        self.register_buffer("steps", torch.zeros(()))
        self.table = torch.linspace(0.5, 1.5, HIDDEN).flip(0)
        with torch.no_grad():
            self.tok.weight.mul_(0.5)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.steps.add_(1)
        x = F.dropout(self.fixed(self.tok(ids)) * self.scale * self.table, 0.1, self.training)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(VOCAB, (ROWS, 5), generator=generator) for name in ("ids", "labels")}


def real(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net()


def fake(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    with sw.fake():
        return Net()


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


class Trained(NamedTuple):
    """Values before and after two steps, by name, whole; losses."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    losses: list[float]


def trained(
    model: nn.Module, cluster: sw.Cluster, given: Mapping[str, Tensor] | None = None, **options: Any
) -> Trained:
    given = batch() if given is None else given
    parallel = sw.compile(model, cluster, kwargs=given, timeout_s=30, check_capture="never", **options)
    values = {**dict(parallel.named_parameters()), **dict(parallel.named_buffers())}
    before = {name: whole(value).detach().clone() for name, value in values.items()}
    optimizer, losses = torch.optim.AdamW([p for p in parallel.parameters() if p.requires_grad], lr=1e-2), []
    torch.manual_seed(5)
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(parallel.forward_backward(**given).item())
        optimizer.step()
    return Trained(before, {name: whole(value).detach().clone() for name, value in values.items()}, losses)


PLANS: dict[str, dict[str, Any]] = {
    "zero3": {"mesh": {"x": 2}, "roles": ["zero"], "pins": {"*": "gathered"}},
    "tensor": {"mesh": {"x": 2}, "roles": ["tensor"]},
    "stages": {"mesh": {"x": 1}, "stages": 2},
}  # fmt: skip


def assert_equal(found: Trained, expected: Trained) -> None:
    assert found.losses == expected.losses
    for one, other in ((found.before, expected.before), (found.after, expected.after)):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert torch.equal(one[name], value), name


@pytest.mark.parametrize("name", some(["zero3", "stages", "tensor"], 1))
def test_a_model_without_memory_trains_as_one_with_memory(name: str) -> None:
    """In every bit; before, its values are those of one process."""

    def body() -> None:
        expected = trained(real(), sw.Cluster.local(2), **PLANS[name])
        found = trained(fake(), sw.Cluster.local(2), **PLANS[name])
        assert_equal(found, expected)
        values = dict(real().named_parameters()) | dict(real().named_buffers())
        for own, value in found.before.items():
            assert torch.equal(value, values[own]), own

    run_ranks(body, 2, 120)


def test_later_programs_of_a_model_without_memory() -> None:
    """Other sizes, the other mode, and what the model returns; each reads a table that is no buffer."""

    def body() -> None:
        found = list[list[Tensor]]()
        for model in (real(), fake()):
            parallel = sw.compile(model, sw.Cluster.local(2), kwargs=batch(), timeout_s=30, **PLANS["zero3"])
            fewer = {name: value[:4] for name, value in batch().items()}
            torch.manual_seed(5)
            losses = [parallel.forward_backward(**given) for given in (batch(), fewer)]
            losses.append(whole(parallel.evaluate(**batch())))
            with torch.no_grad():
                losses.append(parallel.eval()(**batch()))
            found.append([loss.detach() for loss in losses])
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))

    run_ranks(body, 2, 120)


class Around(nn.Module):
    """A layer, and tensors that are neither parameters nor buffers."""

    def __init__(self, keep: Callable[[Around], None], use: Callable[[Around, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(8, 8), use
        keep(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.layer(x)).square().mean()


def keeps(**values: Callable[[], Any]) -> Callable[[Around], None]:
    def keep(model: Around) -> None:
        for name, make in values.items():
            setattr(model, name, make())

    return keep


def remembered(model: Any, hidden: Tensor) -> Tensor:
    result = hidden * model.memory
    model.memory = model.memory * 0.5 + hidden.detach().mean(0)
    return result


TABLES: dict[str, tuple[Callable[[Around], None], Callable[[Any, Tensor], Tensor]]] = {
    "written out": (keeps(), lambda model, h: h * torch.tensor([1.0, 2.0] * 4) + torch.arange(8)),
    "computed alone": (keeps(table=lambda: torch.linspace(0, 1, 8)), lambda model, h: h * (model.table * 2)),
    "converted": (keeps(table=lambda: torch.arange(8)), lambda model, h: h * model.table.to(h.dtype)),
    "in a list": (keeps(all=lambda: [torch.ones(8), torch.eye(8)]), lambda model, h: h * model.all[0] @ model.all[1]),
    "drawn": (keeps(table=lambda: torch.rand(8)), lambda model, h: h * model.table),
    "changed by each step": (keeps(memory=lambda: torch.zeros(8) + 2), remembered),
}  # fmt: skip


def test_tensors_of_a_model_that_are_no_buffers() -> None:
    """In every step as with real values."""

    def body() -> None:
        for name, made in TABLES.items():
            found = list[list[float]]()
            for context in (nullcontext, sw.fake):
                torch.manual_seed(1)
                with context():
                    model = Around(*made)
                found.append(trained(model, sw.Cluster.local(1), {"x": torch.ones(4, 8)}).losses)
            assert found[0] == found[1], name

    run_ranks(body, 1, 120)


class Apart(nn.Module):
    """A part that runs as it is, with a table."""

    def __init__(self, *, is_buffer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        if is_buffer:
            self.register_buffer("table", torch.linspace(0, 1, 8), persistent=False)
        else:
            self.table = torch.linspace(0, 1, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.get_buffer("table") if "table" in self._buffers else self.layer(x) * self.table


def test_a_part_that_runs_as_it_is_has_no_table_of_its_own_without_values() -> None:
    """Whatever a step gave would have none."""

    def around(*, is_buffer: bool) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(Apart(is_buffer=is_buffer), Plain())

    def body() -> None:
        given, options = {"input": torch.ones(4, 8)}, {"foreign": ["0"], **PLANS["zero3"]}
        expected = trained(around(is_buffer=True), sw.Cluster.local(2), given, **options)
        torch.manual_seed(1)
        with sw.fake():
            model, other = around(is_buffer=True), around(is_buffer=False)
        assert_equal(trained(model, sw.Cluster.local(2), given, **options), expected)
        with pytest.raises(
            PlanError, match=r"^0 is foreign, and has a tensor \[8\] without values that is no parameter"
        ):
            trained(other, sw.Cluster.local(2), given, **options)

    run_ranks(body, 2, 120)


# ---- from files ----


def sharded(folder: Path, state: Mapping[str, Tensor], kind: str, write: Callable[..., object]) -> Path:
    """Two files and their index."""
    names = list(state)
    parts = {f"part-{i}.{kind}": {n: state[n] for n in names[i::2]} for i in range(2)}
    for file, own in parts.items():
        write(own, folder / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / f"model.{kind}.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def write(folder: Path) -> None:
    """The state of a model, in every form."""
    state = {name: value.clone() for name, value in real().state_dict().items() if name != "head.weight"}
    places = {name: folder / name for name in ("safetensors", "bin", "dcp")}
    for place in places.values():
        place.mkdir()
    save_file(state, folder / "one.safetensors")
    torch.save({"model": real().state_dict(), "optimizer": {"lr": torch.ones(())}}, folder / "one.pt")
    sharded(places["safetensors"], state, "safetensors", save_file)
    sharded(places["bin"], state, "bin", torch.save)
    save({"net": state, "step": torch.ones(())}, checkpoint_id=places["dcp"])


def forms(folder: Path) -> dict[str, str | sw.WeightFiles]:
    return {
        "one safetensors": str(folder / "one.safetensors"),
        "several": sw.WeightFiles(folder / "safetensors"),
        "several by torch.save": sw.WeightFiles(folder / "bin"),
        "torch.save": sw.WeightFiles(folder / "one.pt", names=lambda name: f"model.{name}"),
        "DCP": sw.WeightFiles(folder / "dcp", names=lambda name: f"net.{name}"),
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    run_ranks(lambda: write(folder), 1, 60)
    return folder


@pytest.mark.parametrize("name", some(PLANS, 2))
def test_values_from_files(name: str, files: Path) -> None:
    """Each rank reads its parts; what files do not have is as the constructor makes it, of whatever seed."""

    def body() -> None:
        expected = trained(real(), sw.Cluster.local(2), **PLANS[name])
        cases = product(forms(files).items(), (lambda: fake(7), lambda: real(8)))
        for (form, weights), model in some(cases, 3 if name == "zero3" else 1):
            found = trained(model(), sw.Cluster.local(2), weights=weights, **PLANS[name])
            assert found.losses == expected.losses, form
            assert_equal(found, expected)

    run_ranks(body, 2, 200)


def test_ranks_seeded_apart_get_the_values_of_rank_0() -> None:
    def body() -> dict[str, Tensor]:
        return trained(fake(dist.get_rank()), sw.Cluster.local(2), **PLANS["zero3"]).before

    values = dict(real(0).named_parameters())
    for found in run_ranks(body, 2, 60):
        assert all(torch.equal(found[name], value) for name, value in values.items())


def read_from(rank: int, std: float = 1.0) -> Net:
    """A model that reads real values of a rank, and a number."""
    with sw.fake():
        model = Net()
        model.blocks[0].get_parameter("norm.bias").data.copy_(torch.from_numpy(np.full(HIDDEN, 1 + rank)))
        nn.init.normal_(model.fixed.weight, std=std)
    return model


def test_ranks_get_what_the_constructor_of_rank_0_reads() -> None:
    def body() -> Tensor:
        return trained(read_from(dist.get_rank()), sw.Cluster.local(2), **PLANS["zero3"]).before["blocks.0.norm.bias"]

    assert all(torch.equal(found, torch.ones(HIDDEN)) for found in run_ranks(body, 2, 60))


def test_ranks_whose_constructors_have_other_numbers() -> None:
    def body() -> None:
        with pytest.raises(DistributedError, match="what the constructor does"):
            trained(read_from(0, std=1.0 + dist.get_rank()), sw.Cluster.local(2), **PLANS["zero3"])

    run_ranks(body, 2, 60)


def test_dimensions_that_ranks_do_not_divide() -> None:
    """Three ranks, of which one has a third of some parameters, and all of others."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 7), nn.Linear(7, 9)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).relu()).square().mean()

    def built(*, unreal: bool) -> nn.Module:
        torch.manual_seed(2)
        with sw.fake() if unreal else nullcontext():
            return Odd()

    def body() -> None:
        given, plan = {"x": torch.ones(6, 6)}, {"mesh": {"x": 3}, "roles": ["zero"]}
        expected, found = (trained(built(unreal=u), sw.Cluster.local(3), given, **plan) for u in (False, True))
        assert_equal(found, expected)

    run_ranks(body, 3, 60)


def test_a_model_on_meta_has_its_values_from_files(tmp_path: Path) -> None:
    save_file({name: value.clone() for name, value in plain().state_dict().items()}, tmp_path / "plain.safetensors")

    def body() -> None:
        given, weights = {"x": torch.ones(4, 8)}, tmp_path / "plain.safetensors"
        expected = trained(plain(), sw.Cluster.local(2), given, **PLANS["zero3"])
        with torch.device("meta"):
            hollow = plain(9)
        assert_equal(trained(hollow, sw.Cluster.local(2), given, weights=weights, **PLANS["zero3"]), expected)

    run_ranks(body, 2, 60)


def plain(seed: int = 4, dtype: torch.dtype | None = None) -> nn.Module:
    torch.manual_seed(seed)
    return Plain().to(dtype)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


# ---- what is refused, before anything is captured ----


class Empty(nn.Module):
    """Two parameters that nothing fills, also when they are converted."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.empty(8)), nn.Parameter(torch.empty(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.one * self.two).sum()


def converted() -> nn.Module:
    with sw.fake():
        return Empty().to(torch.bfloat16)


def of_torch() -> nn.Module:
    with FakeTensorMode():
        return Plain()


def of_two() -> nn.Module:
    with sw.fake():
        model = Plain()
    with sw.fake():
        model.down = nn.Linear(16, 8)
    return model


def written_inside() -> nn.Module:
    model = Plain()
    with sw.fake():
        nn.init.zeros_(model.up.weight)
        model.down = nn.Linear(16, 8)
    return model


def hollow() -> nn.Module:
    with torch.device("meta"):
        return Plain()


UNMADE: list[tuple[Callable[[], nn.Module], str]] = [
    (hollow, r"^Plain: up.weight, up.bias, down.weight, down.bias have no values, as no initializer fills them"),
    (converted, r"^Empty: one, two have no values, as no initializer fills them \(they are as torch.empty"),
    (of_torch, r"^Plain: up.weight, .* have no values, and nothing says how they are made: build the whole model"),
    (of_two, r"^Plain was built inside several `with shardwright.fake\(\)`; build it inside of one"),
    (written_inside, r"^Plain: up.weight has real values, into which something was written inside of `with shardwr"),
]  # fmt: skip


def refused(model: nn.Module, weights: Any = None, given: Mapping[str, Tensor] | None = None) -> str:
    """The message, after which nothing has been captured."""
    captured = list[str]()

    def body() -> str:
        with pytest.raises(PlanError) as error:
            sw.compile(
                model, sw.Cluster.local(1), kwargs=given or {"x": torch.ones(4, 8)}, weights=weights,
                progress=captured.append,
            )  # fmt: skip
        assert not captured
        return str(error.value)

    return run_ranks(body, 1, 60)[0]


@each("make, words", UNMADE)
def test_values_that_nothing_makes(make: Callable[[], nn.Module], words: str) -> None:
    assert re.search(words, refused(make()))


def test_a_buffer_that_files_lack_is_named(files: Path) -> None:
    model = on_meta()
    model.table = torch.ones(HIDDEN)
    told = refused(model, files / "one.safetensors", batch())
    assert re.search(r"^Net: scale has no values, as no initializer fills them", told)


def test_a_tensor_on_meta_that_is_no_buffer(files: Path) -> None:
    model = nn.Sequential(on_meta())
    told = refused(model, files / "one.safetensors", batch())
    assert told.startswith("0.table is on device meta, and neither a parameter nor a buffer that could be read from fi")


def test_what_has_to_be_outside_of_fake() -> None:
    """The call of `compile`, and the batch of a step."""

    def body() -> None:
        with sw.fake():
            model, hollow = Plain(), {"x": torch.ones(4, 8)}
            with pytest.raises(PlanError, match=r"^compile makes memory for this rank's part of the model: call"):
                sw.compile(model, sw.Cluster.local(1), kwargs=hollow)
        parallel = sw.compile(model, sw.Cluster.local(1), kwargs=hollow)
        assert str(parallel.capture_check) == "not checked: the model has no values"
        for batch in (hollow, {"x": torch.ones(4, 8, device="meta")}):
            with pytest.raises(BatchError, match=r"^batch: 'x' has no values \(it is a fake tensor, or on device"):
                parallel.forward_backward(**batch)
        parallel.forward_backward(x=torch.ones(4, 8))

    run_ranks(body, 1, 60)


def test_a_model_without_values_needs_its_batch() -> None:
    def body() -> None:
        with pytest.raises(PlanError, match=r"Net: a model without values, or with weights=, is compiled with its bat"):
            sw.compile(fake(), sw.Cluster.local(1))

    run_ranks(body, 1, 60)


def saved(folder: Path, state: Mapping[str, Tensor]) -> Path:
    path = folder / "other.safetensors"
    save_file(dict(state), path)
    return path


def test_files_of_another_model(tmp_path: Path) -> None:
    """The first ten differences: shapes, dtypes, names."""
    state = plain().state_dict()
    odd = {f"odd.{i}": torch.ones(1) for i in range(9)}
    path = saved(tmp_path, {"up.weight": torch.ones(3, 8), "up.bias": state["up.bias"].half(), **odd})
    lines = refused(plain(), path).splitlines()
    assert lines[0].endswith("other.safetensors is not of this model:")
    assert lines[1:5] == [
        "  up.weight: the files have float32[3, 8], the model float32[16, 8]",
        "  up.bias: the files have float16[16], the model float32[16]",
        "  down.weight is missing in the files",
        "  down.bias is missing in the files",
    ]
    assert lines[5:11] == [f"  odd.{i} is in the files, and not in the model" for i in range(6)]
    assert lines[11] == "  and 3 more"
    assert "strict=False" in lines[12]


class Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@each("make, prefix, remedy", [(Plain, "m.", "names=lambda name: 'm.' + name"), (Within, "", "lambda name: name[4:]")])
def test_files_with_names_under_a_prefix(make: type[nn.Module], prefix: str, remedy: str, tmp_path: Path) -> None:
    path = saved(tmp_path, {f"{prefix}{name}": value for name, value in Plain().state_dict().items()})
    assert remedy in refused(make(), path)


def test_names_dtypes_and_missing_tensors_as_told(tmp_path: Path) -> None:
    """A half of the values, in 16 bits under other names; the other half is as the constructor makes it."""
    state = plain(1).state_dict()
    path = saved(tmp_path, {"a": state["up.weight"].bfloat16(), "b": state["up.bias"].bfloat16(), "c": torch.ones(2)})
    weights = sw.WeightFiles(path, names={"up.weight": "a", "up.bias": "b"}, strict=False, cast=True)

    def body() -> dict[str, Tensor]:
        torch.manual_seed(4)
        with sw.fake():
            model = Plain()
        return trained(model, sw.Cluster.local(2), {"x": torch.ones(4, 8)}, weights=weights, **PLANS["zero3"]).before

    expected = plain(4).state_dict() | {name: state[name].bfloat16().float() for name in ("up.weight", "up.bias")}
    for found in run_ranks(body, 2, 60):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_tied_tensors_that_files_have_apart(tmp_path: Path) -> None:
    model = real()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    same, other = tmp_path / "same.safetensors", tmp_path / "other.safetensors"
    save_file(state, same)
    save_file({**state, "head.weight": state["head.weight"] + 1}, other)

    def body() -> None:
        found = trained(fake(), sw.Cluster.local(1), weights=same).before
        assert torch.equal(found["tok.weight"], state["tok.weight"])
        with pytest.raises(PlanError, match=r"tok.weight and head.weight have different values, and the model has one"):
            trained(fake(), sw.Cluster.local(1), weights=other)

    run_ranks(body, 1, 60)


# ---- files that cannot be read ----


def truncated(folder: Path) -> Path:
    path = saved(folder, plain().state_dict())
    path.write_bytes(path.read_bytes()[:-40])
    return path


def truncated_pickle(folder: Path) -> Path:
    torch.save(plain().state_dict(), folder / "one.pt")
    (folder / "one.pt").write_bytes((folder / "one.pt").read_bytes()[:-400])
    return folder / "one.pt"


def without_a_shard(folder: Path) -> Path:
    (sharded(folder, plain().state_dict(), "safetensors", save_file) / "part-1.safetensors").unlink()
    return folder


def with_another_shard(folder: Path) -> Path:
    sharded(folder, plain().state_dict(), "safetensors", save_file)
    save_file({"up.weight": torch.ones(16, 8)}, folder / "part-1.safetensors")
    return folder


def two_files(folder: Path) -> Path:
    for name in ("a", "b"):
        save_file(plain().state_dict(), folder / f"{name}.safetensors")
    return folder


def no_tensors(folder: Path) -> Path:
    torch.save({"step": 3}, folder / "one.pt")
    return folder / "one.pt"


def of_a_checkpoint(folder: Path) -> Path:
    """A checkpoint one of whose shards is gone."""

    def body() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(plain().state_dict(), checkpoint_id=folder)

    run_ranks(body, 1, 60)
    (folder / "__0_0.distcp").unlink()
    return folder


UNREADABLE: list[tuple[Callable[[Path], Path], str]] = [
    (lambda folder: folder / "none", r"none: there is no such file or folder$"),
    (lambda folder: folder, r" has no \*.safetensors, \*.bin or .metadata \(of torch.distributed.checkpoint\)$"),
    (truncated, r"other.safetensors cannot be read: SafetensorError: "),
    (truncated_pickle, r"one.pt cannot be read: RuntimeError: PytorchStreamReader failed"),
    (without_a_shard, r"names files that are not there: part-1.safetensors$"),
    (with_another_shard, r"^the index names tensors that are not there: "),
    (two_files, r" has a.safetensors, b.safetensors, and it is not clear which are meant; give one of them$"),
    (no_tensors, r"one.pt holds a dict without tensors; save a state_dict\(\) into it$"),
    (of_a_checkpoint, r"^\w+.\w+ cannot be read: FileNotFoundError: "),
]  # fmt: skip


@pytest.mark.parametrize(("make", "words"), UNREADABLE, ids=range(len(UNREADABLE)))
def test_files_that_cannot_be_read(make: Callable[[Path], Path], words: str, tmp_path: Path) -> None:
    assert re.search(words, refused_when_read(make(tmp_path)))


def refused_when_read(path: Path) -> str:
    def body() -> str:
        with pytest.raises(PlanError) as error:
            sw.compile(plain(), sw.Cluster.local(1), kwargs={"x": torch.ones(4, 8)}, weights=path)
        return str(error.value)

    return run_ranks(body, 1, 60)[0]
