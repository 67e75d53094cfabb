"""Buckets of lengths: the few lengths to which sequences are padded, so that a compiled model has few programs.

lengths ──exact, by dynamic programming──▶ the bounds with the fewest padded tokens, for each number of buckets
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from shardwright.lowering.module import ParallelModule
from shardwright.pcg.arguments import NUMBER, Argument, checked
from shardwright.pcg.errors import BatchError
from shardwright.pcg.units import seconds
from shardwright.planned import require_plan
from shardwright.search.request.spaces import batch_size, sequence_length

_LENGTHS = Argument((Iterable,), "the numbers of tokens of sequences", (str,))


@dataclass(frozen=True)
class Bucket:
    """Sequences that are padded to one length.

    bound           the length that they are padded to
    num_sequences   how many there are
    num_tokens      their tokens, without padding
    step_s          the predicted seconds of a step with a batch of this length; None: no compiled model was given
    """

    bound: int
    num_sequences: int
    num_tokens: int
    step_s: float | None = None

    @property
    def num_padded(self) -> int:
        """The tokens of padding."""
        return self.bound * self.num_sequences - self.num_tokens


@dataclass(frozen=True, repr=False)
class Buckets(Sequence[Bucket]):
    """The best buckets of some lengths, from the shortest bound on; `print` says what they save.

    buckets      the buckets
    fewer        the best buckets for each smaller number of them, from one on
    batch_rows   the sequences of a batch of the compiled model; 0 without one
    """

    buckets: tuple[Bucket, ...]
    fewer: tuple[Buckets, ...] = ()
    batch_rows: int = 0

    def __getitem__(self, index: int) -> Bucket:  # type: ignore[override]
        return self.buckets[index]

    def __len__(self) -> int:
        return len(self.buckets)

    @property
    def bounds(self) -> tuple[int, ...]:
        """The lengths that sequences are padded to, in order."""
        return tuple(bucket.bound for bucket in self.buckets)

    @property
    def padding(self) -> float:
        """The share of padding among all tokens of padded sequences."""
        padded = sum(bucket.num_padded for bucket in self.buckets)
        return padded / max(1, padded + sum(bucket.num_tokens for bucket in self.buckets))

    @property
    def epoch_s(self) -> float | None:
        """The predicted seconds of a step for every full batch of every bucket's sequences, or None."""
        times = [bucket.step_s for bucket in self.buckets]
        if not self.batch_rows or any(time is None for time in times):
            return None
        return sum((b.step_s or 0.0) * b.num_sequences / self.batch_rows for b in self.buckets)

    def bound_of(self, length: int) -> int:
        """Return the length to which a sequence is padded. Raises `BatchError` for one that no bucket takes."""
        for bound in self.bounds:
            if length <= bound:
                return bound
        raise BatchError(f"bucket: a sequence of {length} tokens is longer than all buckets, {list(self.bounds)}")

    def __repr__(self) -> str:
        return "\n".join([*map(_line, (*self.fewer, self)), *map(_bucket_line, self.buckets)])


@checked(BatchError, lengths=_LENGTHS, most=NUMBER, multiple=NUMBER)
def bucket(
    lengths: Iterable[int], most: int = 4, *, multiple: int = 1, parallel: ParallelModule | None = None
) -> Buckets:
    """Return the buckets of sequences' lengths for which padding is least, of at most so many; printed, it says so.

    Each number of buckets is one program of a compiled model. The bounds are the best there are, found by dynamic
    programming over the distinct lengths, and the last is that of the longest sequence.

    Args:
        lengths: the number of tokens of each sequence of a data set, or of a sample of it.
        most: the most buckets; fewer where there are not as many lengths.
        multiple: bounds are multiples of this number, such as 8 for kernels, or the ranks that share a sequence.
        parallel: a compiled model, with a plan. A step is then predicted for each bucket, with as many sequences as in
            the batch that it was compiled with, in whose tensors the length is a dimension after the first. Every rank
            calls `bucket` then. It takes a capture for each bucket and makes no program.

    Raises:
        BatchError: there are no lengths, or one is not positive; `most` or `multiple` is not positive; the compiled
            model has no plan, or takes no sequences.
    """
    known, counts = np.unique(np.fromiter(lengths, np.int64), return_counts=True)
    if not len(known) or known[0] < 1 or most < 1 or multiple < 1:
        raise BatchError(
            f"bucket: expected lengths of 1 or more, and most= and multiple= of 1 or more; got {len(known)} lengths"
            f"{f' from {known[0]} on' if len(known) else ''}, most={most}, multiple={multiple}"
        )
    bounds, places = np.unique(-(-known // multiple) * multiple, return_inverse=True)
    numbers, tokens = (np.bincount(places, weights=x).astype(np.int64) for x in (counts, known * counts))
    candidates = [
        tuple(Bucket(int(bounds[j - 1]), int(numbers[i:j].sum()), int(tokens[i:j].sum())) for i, j in pairwise(cuts))
        for cuts in _best_cuts(bounds, numbers, min(most, len(bounds)))
    ]
    rows = 0
    if parallel is not None:
        rows, times = _steps(parallel, sorted({bucket.bound for buckets in candidates for bucket in buckets}))
        candidates = [
            tuple(replace(bucket, step_s=times[bucket.bound]) for bucket in buckets) for buckets in candidates
        ]
    *fewer, best = (Buckets(buckets, batch_rows=rows) for buckets in candidates)
    return replace(best, fewer=tuple(fewer))


def _best_cuts(bounds: np.ndarray, numbers: np.ndarray, most: int) -> list[list[int]]:
    """Return, for each number of buckets up to `most`, where the bounds are cut: from 0 to their number.

    least[k][j] = min over i < j of least[k − 1][i] + bounds[j − 1] · (sequences between i and j)
    """
    before, size = np.concatenate([[0], numbers.cumsum()]), len(bounds)
    least = np.concatenate([[0.0], np.full(size, np.inf)])
    origins, cuts_by_number = list[np.ndarray](), list[list[int]]()
    for _ in range(most):
        best, origin = np.full(size + 1, np.inf), np.zeros(size + 1, np.int64)
        for j in range(1, size + 1):
            sums = least[:j] + bounds[j - 1] * (before[j] - before[:j])
            origin[j] = sums.argmin()
            best[j] = sums[origin[j]]
        least = best
        origins.append(origin)
        cuts = [size]
        for each in reversed(origins):
            cuts.insert(0, int(each[cuts[0]]))
        cuts_by_number.append(cuts)
    return cuts_by_number


def _steps(parallel: ParallelModule, bounds: Sequence[int]) -> tuple[int, dict[int, float]]:
    """Return the sequences of a batch, and the predicted seconds of a step by the length of its sequences."""
    require_plan(parallel, "bucket", BatchError)
    check, length = next(iter(parallel.entries)).batch, sequence_length(parallel.graph)
    if parallel.maker is None:
        raise BatchError("bucket: expected a model that shardwright.compile gave, as it knows what it would plan")
    if length is None or any("." in name for name in check.shapes):
        raise BatchError(
            f"bucket: the batch has {', '.join(sorted(check.shapes))}; expected token ids among its tensors, no nests"
        )

    def batch(bound: int) -> dict[str, Tensor]:
        shapes = {name: [*s[:1], *(bound if n == length else n for n in s[1:])] for name, s in check.shapes.items()}
        return {name: torch.zeros(shape, dtype=check.dtypes[name]) for name, shape in shapes.items()}

    times = parallel.maker.predicted([parallel.entries.with_options(batch(bound)) for bound in bounds])
    return batch_size(parallel.graph), dict(zip(bounds, times, strict=True))


def _line(buckets: Buckets) -> str:
    bounds = ", ".join(map(str, buckets.bounds))
    padded = sum(bucket.num_padded for bucket in buckets)
    time = "" if buckets.epoch_s is None else f"; an epoch takes {seconds(buckets.epoch_s)} by the cost model"
    what = "1 bucket " if len(buckets) == 1 else f"{len(buckets)} buckets"
    return f"{what}  padded to {bounds}: {padded} tokens of padding, {buckets.padding:.1%} of all{time}"


def _bucket_line(bucket: Bucket) -> str:
    step = "" if bucket.step_s is None else f", {seconds(bucket.step_s)} a step"
    return f"  {bucket.bound}: {bucket.num_sequences} sequences, {bucket.num_padded} tokens of padding{step}"
