"""The states of all generators that a rank draws from, for checkpoints."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch

from shardwright.lowering.random.drawing import Stream
from shardwright.lowering.random.exact import exact_random
from shardwright.pcg.errors import CheckpointError

States = dict[str, Any]
"""By generator; tensors, numbers, texts and nests of them, as `torch.load(weights_only=True)` reads them."""


def states_of(stream: Stream) -> States:
    """Return the states of torch's, NumPy's and Python's generators, of `seed_exactly`, and of the program's stream."""
    exact, numpy = exact_random(), cast("Any", np.random.get_state(legacy=True))
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if on_gpu else None,
        "numpy": [numpy[0], torch.from_numpy(numpy[1].astype(np.int64)), *numpy[2:]],
        "python": _listed(random.getstate()),
        "exact": None if exact is None else exact.state_dict(),
        "stream": stream.state,
    }


def check_states(states: States) -> None:
    """Raise `CheckpointError` if the saved run drew by `seed_exactly` and this one does not, or the reverse."""
    if exact_random() is None and states["exact"] is not None:
        raise CheckpointError("it was saved under seed_exactly, and this run does not use it; call it before load")
    if exact_random() is not None and states["exact"] is None:
        raise CheckpointError("it was saved without seed_exactly, and this run uses it; end it before load")


def set_states(states: States, stream: Stream, *, is_own: bool) -> None:
    """Continue from saved states. Where they are another rank's (not `is_own`), set only what all ranks share."""
    if (exact := exact_random()) is not None:
        exact.load_state_dict(states["exact"])
    if states["stream"] is not None:
        stream.state = states["stream"]
    if not is_own:
        return
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(_tupled(states["python"]))


def _listed(state: object) -> object:
    return [_listed(item) for item in state] if isinstance(state, tuple) else state


def _tupled(state: object) -> Any:  # noqa: ANN401
    return tuple(_tupled(item) for item in state) if isinstance(state, list) else state
