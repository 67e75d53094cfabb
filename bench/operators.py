"""The sweep: torch's own list of differentiable operators and modules, each under plans, against the single process.

`torch.testing` lists every operator and module with sample inputs. A *call* is one of them on one sample: tensors that
take a gradient are parameters, the others buffers, and each result is multiplied by a weight of its own in the loss. So
the gradient of that weight is the result itself, and gradients say all there is to compare, element by element:

    error = max |g − g_ref| / max(1, max |g_ref|)

Many calls are one model, because an export takes its time whatever is in it. Each model is run on one rank, on two with
everything whole, and on two under the search's plan for links that cost nothing, which splits what it can.

Writes docs/operators.md and exits with 1 where a gradient is wrong. Run it with `make operators`.
"""

from __future__ import annotations

import argparse
import copy
import logging
import pkgutil
import re
import sys
import time
import types
import unittest
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date
from importlib import import_module
from itertools import islice, product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from bench.plans import CERTIFIED, fast_links
from shardwright.lowering.module import lower
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.capture.capture import Captured, capture
from shardwright.pcg.choice import COPIED, WHOLE
from shardwright.pcg.errors import CaptureError, ShardwrightError
from shardwright.pcg.graph import OPAQUE, Graph, Node
from shardwright.pcg.mesh import Mesh
from shardwright.search.request.restrict import DATA, FREE
from shardwright.search.tree.planner import Planner

REASONS = {
    "complex numbers": "compute with real numbers",
    "sparse tensors": r"layout torch\.sparse",
    "shapes or numbers that depend on data": "depends on data|DynamicOutputShape|unbacked symbols",
    "decisions that depend on data": "DataDependent",
    "what torch.export cannot trace": "alias annotations|set the storage of a tensor",
}
"""Why capture may refuse a call, and what the message then says."""
TOLERANCE = 1e-9
"""Of gradients in fp64."""
SEED = 3
SIZE, USUAL_SIZE = 6, 5
"""Of most dimensions of the samples, in place of torch's 5, which two ranks cannot divide."""
PAGE = Path(__file__).parents[1] / "docs" / "operators.md"
GROUP = 24
"""Calls in a model."""


@dataclass(frozen=True)
class Sample:
    """An operator or module and what it is called with. `name` is torch's, with the variant and the sample's number."""

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def operator(self) -> str:
        return self.name.split(" ")[0]


@dataclass
class Verdict:
    """The outcome of a call.

    `refused`: what capture says where it does not take it; `opaque`: operators of it that have no row; `num_split`: how
    many operators are divided between two ranks; `errors`: by plan; `failure`: of a program that did not run.
    """

    name: str
    refused: str = ""
    opaque: tuple[str, ...] = ()
    num_split: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    failure: str = ""

    @property
    def reason(self) -> str:
        """Return the reason of a refusal, or "" if there is none or it is not known."""
        return next((reason for reason, said in REASONS.items() if re.search(said, self.refused)), "")

    @property
    def good(self) -> bool:
        if self.refused:
            return bool(self.reason)
        return not self.failure and bool(self.errors) and all(error <= TOLERANCE for error in self.errors.values())


class Call(nn.Module):
    """One sample as a model whose loss has every element of every result in it."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        leaves, self.spec = tree_flatten((sample.args, sample.kwargs))
        self.run = sample.run
        self.leaves: list[Any] = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.register_parameter(f"x{i}", nn.Parameter(leaf.detach().clone()))
            elif isinstance(leaf, Tensor):
                self.register_buffer(f"x{i}", leaf.detach().clone())
            self.leaves.append(None if isinstance(leaf, Tensor) else leaf)
        with torch.no_grad():
            results = self.results()
        draws = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterList(torch.randn(y.shape, generator=draws, dtype=torch.float64) for y in results)

    def results(self) -> list[Tensor]:
        values = [getattr(self, f"x{i}", leaf) for i, leaf in enumerate(self.leaves)]
        values = [x.clone() if isinstance(x, nn.Parameter) else x for x in values]  # may be written in place
        args, kwargs = tree_unflatten(values, self.spec)
        return [y for y in tree_leaves(self.run(*args, **kwargs)) if isinstance(y, Tensor)]

    def forward(self) -> Tensor:
        parts = (y.real if y.is_complex() else y for y in self.results())
        return sum(((y.double() * w).sum() for y, w in zip(parts, self.weights, strict=True)), torch.zeros(()))


class Calls(nn.Module):
    """Many calls, one after the other."""

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__()
        self.calls = nn.ModuleList(calls)

    def forward(self, one: Tensor) -> Tensor:
        return sum((call() for call in self.calls), one.sum())


# ---- torch's lists ----


class _Lists:
    """Torch's lists of operators and modules. Their operators do not seed the generator, as they do by themselves.

    Nor does a sample look for a test of torch's on the stack, which takes longer than all that is done with it.
    """

    def __init__(self) -> None:
        if "expecttest" not in sys.modules:  # which torch's own tests need, and its lists do not
            stand_in = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
            sys.modules["expecttest"] = stand_in
        lists = import_module("torch.testing._internal.common_methods_invocations")
        infos = import_module("torch.testing._internal.opinfo.definitions")
        self._files = [lists, import_module("torch.testing._internal.opinfo.core")]
        self._files += [import_module(f"{infos.__name__}.{m.name}") for m in pkgutil.iter_modules(infos.__path__)]
        for file in self._files:
            if hasattr(file, "wrapper_set_seed"):
                file.wrapper_set_seed = _unseeded  # type: ignore[attr-defined]
            if hasattr(file, "extract_test_fn"):
                file.extract_test_fn = _no_test  # type: ignore[attr-defined]
        self.operators: list[Any] = lists.op_db
        self.modules: list[Any] = import_module("torch.testing._internal.common_modules").module_db

    @contextmanager
    def sized(self, size: int) -> Generator[None]:
        """Samples that are drawn have this size in most of their dimensions."""
        with ExitStack() as stack:
            for file in self._files:
                if getattr(file, "S", None) == USUAL_SIZE:
                    stack.enter_context(mock.patch.object(file, "S", size))
            yield


def _unseeded(op: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
    return op(*args, **kwargs)


def _no_test() -> None:
    return None


def samples(num_each: int = 1, matching: str = "") -> list[Sample]:
    """The first samples of every operator and module that torch differentiates, and of operators in place.

    `matching`: of those whose names match. What torch itself refuses is among them: see `working`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lists = _Lists()
        listed = [*_of_operators(lists, num_each, matching), *_of_modules(lists, num_each, matching)]
    others = [*_of_other_modules(), *_of_booleans()]
    return [*listed, *(sample for sample in others if re.search(matching, sample.operator))]


def _of_operators(lists: _Lists, num_each: int, matching: str) -> Iterator[Sample]:
    for info in lists.operators:
        kind = next((k for k in (torch.float64, torch.float32) if k in info.supported_dtypes("cpu")), None)
        if not info.supports_autograd or kind is None or not re.search(matching, info.full_name):
            continue
        torch.manual_seed(0)
        for number, drawn in enumerate(_drawn(info, kind, lists, num_each)):
            args = (drawn.input, *drawn.args)
            yield Sample(f"{info.full_name} {number}", info.op, args, drawn.kwargs)
            if info.inplace_variant is not None and number == 0:
                yield Sample(f"{info.full_name} in place", info.inplace_variant, args, drawn.kwargs)


def _of_modules(lists: _Lists, num_each: int, matching: str) -> Iterator[Sample]:
    for info, training in product(lists.modules, (True, False)):
        kind = info.module_cls
        if torch.float64 not in info.dtypes or not re.search(matching, f"nn.{kind.__name__}"):
            continue
        torch.manual_seed(0)
        for number, given in enumerate(
            islice(info.module_inputs_func(info, "cpu", torch.float64, True, training), num_each)
        ):
            made, called = given.constructor_input, given.forward_input
            module = kind(*made.args, **made.kwargs).double().train(training)
            name = f"nn.{kind.__name__} {number} in {'training' if training else 'evaluation'}"
            yield Sample(name, module, called.args, called.kwargs)


def _of_other_modules() -> Iterator[Sample]:
    """The modules of torch.nn that its list leaves out, but for containers, lazy ones and those for GPUs."""
    draws = torch.Generator().manual_seed(0)

    def real(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws, dtype=torch.float64).requires_grad_()

    sequence, images = real(4, 6, 8), real(2, 4, 8, 6)
    largest = [F.max_pool1d(sequence, 2, return_indices=True), F.max_pool2d(images, 2, return_indices=True)]
    tokens, classes = torch.arange(12).reshape(4, 3) % 5, torch.arange(6)
    made: list[tuple[nn.Module, tuple[Tensor, ...]]] = [
        (nn.RReLU(), (sequence,)),
        (nn.RReLU(inplace=True), (sequence,)),
        (nn.AlphaDropout(), (sequence,)),
        (nn.FeatureAlphaDropout(), (images,)),
        (nn.Dropout(0.3), (sequence,)),
        (nn.Dropout(0.3, inplace=True), (sequence,)),
        (nn.Dropout1d(), (sequence,)),
        (nn.Dropout2d(), (images,)),
        (nn.Dropout3d(), (real(2, 4, 2, 4, 2),)),
        (nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4]), (real(6, 8), classes)),
        (nn.ChannelShuffle(2), (images,)),
        (nn.CosineSimilarity(), (real(4, 6), real(4, 6))),
        (nn.CrossMapLRN2d(2), (images,)),
        (nn.EmbeddingBag(6, 4), (tokens,)),
        (nn.Flatten(), (images,)),
        (nn.Fold((4, 4), 2), (real(2, 12, 9),)),
        (nn.Hardsigmoid(), (sequence,)),
        (nn.Identity(), (sequence,)),
        (nn.MaxUnpool1d(2), tuple(x.detach().requires_grad_(x.is_floating_point()) for x in largest[0])),
        (nn.MaxUnpool2d(2), tuple(x.detach().requires_grad_(x.is_floating_point()) for x in largest[1])),
        (nn.PairwiseDistance(), (real(4, 6), real(4, 6))),
        (nn.PixelShuffle(2), (images,)),
        (nn.PixelUnshuffle(2), (images,)),
        (nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2), (real(4, 2, 8), real(6, 2, 8))),
        (nn.TripletMarginLoss(), (real(4, 6), real(4, 6), real(4, 6))),
        (nn.TripletMarginWithDistanceLoss(), (real(4, 6), real(4, 6), real(4, 6))),
        (nn.Unflatten(1, (2, 3)), (sequence,)),
        (nn.Unfold(2), (images,)),
        (nn.Upsample(scale_factor=2), (images,)),
        (nn.UpsamplingBilinear2d(scale_factor=2), (images,)),
        (nn.UpsamplingNearest2d(scale_factor=2), (images,)),
    ]
    for number, (module, args) in enumerate(made):
        for training in (True, False):
            name = f"nn.{type(module).__name__} {number} in {'training' if training else 'evaluation'}"
            yield Sample(name, copy.deepcopy(module).double().train(training), args, {})


def _of_booleans() -> Iterator[Sample]:
    """Attention's hand-written masks: torch's samples are all of real numbers."""
    scores = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def above(x: Tensor) -> Tensor:
        return x.masked_fill(torch.ones(SIZE, SIZE, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)

    def below(x: Tensor) -> Tensor:
        return torch.where(torch.ones(SIZE, SIZE, dtype=torch.bool).tril() & (x > -1), x, -1e9).softmax(-1)

    yield Sample("mask.triu 0", above, (scores.clone().requires_grad_(),), {})
    yield Sample("mask.tril 0", below, (scores.clone().requires_grad_(),), {})


def _drawn(info: Any, kind: torch.dtype, lists: _Lists, num_each: int) -> list[Any]:  # noqa: ANN401
    """The first sample inputs, of torch's own sizes where another breaks them."""
    for size in (SIZE, USUAL_SIZE):
        try:
            with lists.sized(size):
                return list(islice(info.sample_inputs("cpu", kind, requires_grad=True), num_each))
        except (RuntimeError, ValueError, IndexError, AssertionError):
            pass
    raise AssertionError(f"torch cannot draw its own samples of {info.full_name}")


# ---- running them ----


def working(found: Iterable[Sample]) -> list[Sample]:
    """Return the samples with gradients in torch itself: dense real tensors on which some result depends."""
    listed = list(found)
    (works,) = run_ranks(lambda: [_works(sample) for sample in listed], 1, 600.0)
    return [sample for sample, good in zip(listed, works, strict=True) if good]


def _works(sample: Sample) -> bool:
    leaves = [x for x in tree_leaves((sample.args, sample.kwargs)) if isinstance(x, Tensor)]
    if any(x.layout is not torch.strided or x.is_complex() for x in leaves):
        return False
    try:
        loss = Call(sample)()
        loss.backward()
    except Exception:  # noqa: BLE001  # whatever torch does not differentiate
        return False
    return True


def judge(found: Sequence[Sample]) -> list[Verdict]:
    """The verdicts on calls of one model; where that is refused or fails, on its halves, down to a single call."""
    try:
        return _judge(found)
    except ShardwrightError as error:
        if len(found) == 1:
            said = [line for line in str(error).splitlines() if line.strip()]
            refused = isinstance(error, CaptureError)
            return [Verdict(found[0].name, said[0] if refused else "", failure="" if refused else said[-1])]
        half = len(found) // 2
        return [*judge(found[:half]), *judge(found[half:])]


def _judge(found: Sequence[Sample]) -> list[Verdict]:
    model = Calls([Call(sample) for sample in found])
    batch = {"one": torch.ones(1, dtype=torch.float64)}
    captured = capture(model, batch)
    verdicts = [Verdict(sample.name, opaque=_opaque(captured.graph, i)) for i, sample in enumerate(found)]
    (expected,) = run_ranks(_gradients, 1, 120.0, args=(model, batch))
    for plan, graph in _plans(captured.graph):
        by_rank = run_ranks(_errors, graph.mesh.num_devices, 120.0, args=(model, batch, captured, graph, expected))
        for i, verdict in enumerate(verdicts):
            names = [name for name in expected if name.startswith(f"calls.{i}.")]
            verdict.errors[plan] = max(errors[name] for errors in by_rank for name in ["", *names])
            verdict.num_split = max(verdict.num_split, _num_split(graph, i))
    return verdicts


def _plans(serial: Graph) -> Iterator[tuple[str, Graph]]:
    yield "one rank", serial
    mesh, planner = Mesh.of(x=2), Planner(fast_links(2), CERTIFIED)
    yield "two ranks, whole", planner.solve(serial, mesh, (DATA,), "operators").graph  # no input has a batch
    yield "two ranks, split", planner.solve(serial, mesh, (FREE,), "operators").graph


def _gradients(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the single process and, as "", the state of the generator after the step."""
    torch.manual_seed(SEED)
    model(**batch).backward()
    return _taken(model)


def _errors(
    model: nn.Module, batch: dict[str, Tensor], captured: Captured, graph: Graph, expected: dict[str, Tensor]
) -> dict[str, float]:
    parallel = lower(graph, model, constants=captured.constants, options=captured.options)
    torch.manual_seed(SEED)
    parallel.forward_backward(**batch)
    got = _taken(parallel)
    return {name: _error(got[name], expected[name]) for name in expected}


def _taken(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    whole = {name: (g.full_tensor() if isinstance(g, DTensor) else g).detach() for name, g in found.items()}
    return {"": torch.get_rng_state().double(), **{name: torch.zeros_like(g).copy_(g) for name, g in whole.items()}}


def _error(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the larger of scale and 1; infinite where only one of the two is a number."""
    if got.shape != expected.shape or not torch.equal(got.isfinite(), expected.isfinite()):
        return float("inf")
    finite = expected.isfinite()
    difference, scale = (got - expected)[finite].abs(), expected[finite].abs()
    return float(difference.max() / scale.max().clamp(min=1)) if difference.numel() else 0.0


def _own(graph: Graph, number: int) -> Iterator[Node]:
    """The operators of one call."""
    path = f"calls.{number}"
    return (n for n in graph.nodes if not n.is_leaf and f"{n.source.module}.".startswith(f"{path}."))


def _opaque(graph: Graph, number: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(n.attr("target")) for n in _own(graph, number) if n.op == OPAQUE))


def _num_split(graph: Graph, number: int) -> int:
    return sum(
        any(choice not in (WHOLE, COPIED) for choice in n.split) for n in _own(graph, number) if not n.is_parallel
    )


def sweep(found: Sequence[Sample], size: int = GROUP) -> Iterator[Verdict]:
    """The verdict on every call, in models of `size` calls."""
    logging.disable(logging.CRITICAL)
    for start in range(0, len(found), size):
        yield from judge(found[start : start + size])


# ---- the page ----

INTRODUCTION = """\
# Torch's operators, one by one

Every operator and module that torch itself lists as differentiable (`op_db` and `module_db` of `torch.testing`), with
torch's own sample inputs, operators also in place and modules in training and in evaluation: the result and every
gradient, element by element in fp64, against the same call without Shardwright. On one gloo rank, on two with
everything whole, and on two under the plan that the search finds where links cost nothing, which splits what it can.
Written by `make operators` on {date} with torch {torch}.

An error is max |g − g_ref| / max(1, max |g_ref|); {tolerance:g} is tolerated. The state of the random generator
after the step has to be the same bit by bit. `tests/test_operators.py` runs a sample of this, with every kind of
handler in it.

| | calls | of operators and modules |
|---|--:|--:|
"""


def page(verdicts: Sequence[Verdict]) -> str:
    """The whole page as Markdown."""
    ran = [v for v in verdicts if v.errors]
    groups = {
        "all": list(verdicts),
        "run, and equal": [v for v in ran if v.good],
        "… by rows of the op table alone": [v for v in ran if v.good and not v.opaque],
        "… with operators that have no row and run whole": [v for v in ran if v.good and v.opaque],
        "… with something divided between two ranks, be it the product and the sum of the loss": [
            v for v in ran if v.good and v.num_split
        ],
        "refused, with a reason": [v for v in verdicts if v.refused and v.good],
        "**wrong**": [v for v in verdicts if not v.good],
    }
    head = INTRODUCTION.format(date=date.today().isoformat(), torch=torch.__version__, tolerance=TOLERANCE)
    lines = [f"| {what} | {len(of)} | {len(_names(of))} |" for what, of in groups.items()]
    lines += ["", "| plan | largest error |", "|---|--:|"]
    plans = dict.fromkeys(plan for v in ran for plan in v.errors)
    lines += [f"| {plan} | {max(v.errors[plan] for v in ran if plan in v.errors):.0e} |" for plan in plans]
    lines += ["", "## Refused", ""]
    for reason in REASONS:
        lines.append(f"* {reason}: {_listed(v for v in verdicts if v.refused and v.reason == reason)}")
    lines += ["", "## Wrong", "", _listed(v for v in verdicts if not v.good)]
    lines += ["", "## With operators that have no row", ""]
    lines += ["They run whole on every rank, in the operators of torch that are named.", ""]
    lines += [f"* {_listed(v for v in ran if v.opaque == of)}: {', '.join(f'`{o}`' for o in of)}" for of in
              sorted({v.opaque for v in ran if v.opaque})]  # fmt: skip
    return head + "\n".join(lines) + "\n"


def _names(verdicts: Iterable[Verdict]) -> list[str]:
    return list(dict.fromkeys(v.name.split(" ")[0] for v in verdicts))


def _listed(verdicts: Iterable[Verdict]) -> str:
    return ", ".join(f"`{name}`" for name in _names(verdicts)) or "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=2, help="of each operator")
    parser.add_argument("--matching", default="", help="only operators whose names match")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    listed = list(samples(options.samples, options.matching))
    found = working(listed)
    print(f"{len(found)} of {len(listed)} calls have a gradient in torch", flush=True)
    print(f"drawn in {time.perf_counter() - started:.0f} s", flush=True)
    verdicts = list[Verdict]()
    for verdict in sweep(found):
        verdicts.append(verdict)
        if not verdict.good:
            print(verdict, flush=True)
    print(f"{len(verdicts)} calls in {time.perf_counter() - started:.0f} s")
    if not options.matching:
        PAGE.write_text(page(verdicts))
    return 0 if all(v.good for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
