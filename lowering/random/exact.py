"""Exact randomness: each dropout mask of a process as a function of a seed and of the number of masks before it.

    seed_exactly(0) ──▶ every dropout of this process: Philox(seed, number of the draw, place in the tensor)

A single PyTorch process numbers its draws in the order of its calls. A lowered program knows the number of each draw
from the captured graph, advances the counter by a whole step at once, and computes only its own part of each mask.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import torch
from torch import Tensor

from shardwright.lowering import private
from shardwright.lowering.random.philox import keep_mask
from shardwright.pcg.attrs import integer
from shardwright.pcg.capture.importing import memory_order
from shardwright.pcg.errors import ShardwrightError
from shardwright.pcg.graph import Graph


@dataclass(frozen=True, slots=True)
class Draw:
    """A draw of a process: its seed and number; the seed is None if torch's own generator draws.

    `by_part`: torch's generator draws each part of the mask, seeded with a function of seed, number and part.
    """

    seed: int | None = None
    number: int = 0
    by_part: bool = False

    def __add__(self, count: int) -> Draw:
        return Draw(self.seed, self.number + count, self.by_part)


class ExactRandom:
    """The state that `seed_exactly` starts: the seed, and the number of the next draw.

    It ends with `close()`, or as a context manager; then the state before it applies again.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._counter = _word(seed, "seed"), 0
        self._before = _PROCESS.current
        self._drawn_again = self._in_program = False
        _PROCESS.switch(self)

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def counter(self) -> int:
        """The number of masks drawn so far, which is the number of the next mask."""
        return self._counter

    def state_dict(self) -> dict[str, int]:
        """Return the whole state, for checkpoints; it is equal on all ranks."""
        return {"seed": self._seed, "counter": self._counter}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a state that `state_dict` returned."""
        if set(state) != {"seed", "counter"}:
            raise ShardwrightError(
                f"load_state_dict: expected the keys 'seed' and 'counter', got {sorted(map(str, state))}; "
                "pass what state_dict() of seed_exactly's result gave"
            )
        self._seed, self._counter = _word(state["seed"], "seed"), _word(state["counter"], "counter")

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts for `context_fn` of `torch.utils.checkpoint.checkpoint`; recomputation redraws masks."""
        first: list[int] = []
        return self._remembering(first), self._drawing_again(first)

    @contextmanager
    def _remembering(self, first: list[int]) -> Generator[None]:
        first[:] = [self._counter]
        yield

    @contextmanager
    def _drawing_again(self, first: list[int]) -> Generator[None]:
        before = self._counter, self._drawn_again
        (self._counter,), self._drawn_again = first, True
        try:
            yield
        finally:
            self._counter, self._drawn_again = before

    @contextmanager
    def program(self, num_draws: int) -> Generator[Draw]:
        """Surround the step of a lowered program, which draws by number; yield its first draw."""
        first, before = Draw(self._seed, self._counter), self._in_program
        self._counter, self._in_program = self._counter + num_draws, True
        try:
            yield first
        finally:
            self._in_program = before

    def next(self) -> Draw:
        """Return the next draw of an ordinary PyTorch process."""
        if self._in_program:
            raise ShardwrightError(
                "under seed_exactly an operator of a lowered program draws a mask that has no number in its graph "
                "(recurrent layers with dropout); use nn.Dropout(p) there, or train without seed_exactly"
            )
        if private.in_backward() and not self._drawn_again:
            raise ShardwrightError(
                "under seed_exactly dropout was drawn again in backward, where its number is not known; give the "
                "checkpoint use_reentrant=False and context_fn=random.checkpoint_contexts, where random is what "
                "seed_exactly returned"
            )
        draw = Draw(self._seed, self._counter)
        self._counter += 1
        return draw

    def close(self) -> None:
        """Go back to torch's generator, or to the state that an earlier `seed_exactly` started."""
        if _PROCESS.current is self:
            _PROCESS.switch(self._before)

    def __enter__(self) -> ExactRandom:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ExactRandom(seed={self._seed}, counter={self._counter})"


class _Process:
    """The source of this process's draws, and the kernels of torch that are replaced meanwhile."""

    def __init__(self) -> None:
        self.current: ExactRandom | None = None
        self._kernels: private.Kernels | None = None

    def switch(self, current: ExactRandom | None) -> None:
        self.current = current
        if current is not None and self._kernels is None:
            self._kernels = private.Kernels(_replacements())
        elif current is None and self._kernels is not None:
            self._kernels.restore()
            self._kernels = None


_PROCESS = _Process()


def exact_random() -> ExactRandom | None:
    """Return the state of this process that `seed_exactly` has started, if it still applies."""
    return _PROCESS.current


def seed_exactly(seed: int) -> ExactRandom:
    """Make dropout masks depend on `seed` and their order alone, on any device and under any plan.

    Call it in each process, beside `torch.manual_seed`, before training. Then `F.dropout` and its kin (dropout in
    attention, alpha, feature and in-place dropout, `Tensor.bernoulli_(p)`) draw by a counter-based generator: the n-th
    mask of the process is Philox(seed, n, place of the element). A lowered program computes only its own part of each
    mask, with the same values under every plan. Without `seed_exactly`, a rank on a CPU draws whole masks from torch's
    generator, and a rank on a GPU draws its own parts, seeded by a number that torch's generator draws for the step.

    The counter advances by one with every mask: once for each dropout with 0 < p < 1 in train mode, in the order of the
    calls. A lowered program advances it by the number of the model's dropouts per step, with or without microbatches.
    Torch's own generator is not used for masks meanwhile, and serves everything else as before.

    The result has the state for checkpoints (`state_dict`, `load_state_dict`) and the `checkpoint_contexts` for
    `torch.utils.checkpoint`. It is a context manager, after which masks come from torch's generator again.
    Raises `ShardwrightError` if `seed` is not an integer in [0, 2⁶⁴).
    """
    return ExactRandom(seed)


def num_draws(graph: Graph) -> int:
    """Return the number of masks that a step of the captured model draws for the loss or a buffer."""
    return 1 + max((integer(dict(node.attrs), "seed") for node in graph.nodes if node.is_random), default=-1)


def current_random() -> ExactRandom | None:
    """Return the state that `seed_exactly` started last; None if torch's own generator draws."""
    return _PROCESS.current


def current_draw() -> Draw:
    """Return the next draw of this process; its seed is None if torch's own generator draws."""
    current = _PROCESS.current
    return Draw() if current is None else Draw(current.seed, current.counter)


@contextmanager
def step_draws(num_draws: int) -> Generator[Draw]:
    """Surround the step of a lowered program that draws this many masks; yield the first draw."""
    if _PROCESS.current is None:
        yield Draw()
    else:
        with _PROCESS.current.program(num_draws) as draw:
            yield draw


def _word(value: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise ShardwrightError(f"{what} {value!r}: expected an integer from 0 to 2**64 - 1, got {type(value).__name__}")
    return value


# ---- the kernels that replace torch's meanwhile ----


def _mask(x: Tensor, keep: float) -> Tensor:
    """Return the next mask, for a tensor that is stored like `x`; places are numbered in the order of memory."""
    assert _PROCESS.current is not None
    draw, order = _PROCESS.current.next(), memory_order(x.stride())
    assert draw.seed is not None
    mask = keep_mask([x.shape[d] for d in order], keep, draw.seed, draw.number, x.device)
    return mask.permute([order.index(d) for d in range(x.dim())])


def _bernoulli(
    original: private.Kernel, x: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None
) -> Tensor:
    if generator is not None or not 0 < p < 1 or not x.numel():
        return original(x, p, generator=generator)
    return x.copy_(_mask(x, p))


def _native_dropout(original: private.Kernel, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or not 0 < p < 1 or not x.numel():
        return original(x, p, train)
    mask = torch.empty_like(x, dtype=torch.bool)
    mask.copy_(_mask(mask, 1 - p))
    return x.mul(mask).mul_(1 / (1 - p)), mask


def fused_attention(name: str, original: private.Kernel, *args: object, **kwargs: object) -> object:
    """Raise if a fused attention has dropout, as its kernel draws by itself; else run it."""
    given = dict(zip(private.argument_names(name), args, strict=False)) | kwargs
    if given.get("dropout_p"):
        raise ShardwrightError(
            f"under seed_exactly attention with dropout cannot run in the kernel {name}, which draws by itself; run "
            "the model inside torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )
    return original(*args, **kwargs)


_DROPOUTS = {"bernoulli_.float": _bernoulli, "native_dropout": _native_dropout}
_FUSED = tuple(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn"))


def _replacements() -> dict[tuple[str, str], private.Kernel]:
    devices = ("CPU", "CUDA") if torch.backends.cuda.is_built() else ("CPU",)
    kernels: dict[tuple[str, str], private.Kernel] = {
        (n, d): kernel for n, kernel in _DROPOUTS.items() for d in devices
    }
    if "CUDA" in devices:
        kernels.update({(name, "CUDA"): partial(fused_attention, name) for name in _FUSED})
    return kernels
