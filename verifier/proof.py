"""The result of a proof: its axioms, or a failure, which is refuted or unknown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.pcg.errors import ShardwrightError

BEYOND = (TypeError, ValueError, KeyError, IndexError, AttributeError, ZeroDivisionError, RecursionError)
"""The errors, besides our own, that are raised for terms beyond the semantics."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A claim that was not proven: refuted, by numbers (`model`) or by its types, or unknown. Neither is ever used.

    malformed   True if the rule claims nothing: the claim names the field that no tensors fit
    """

    claim: str
    model: Mapping[str, str] | None = None
    ill_typed: bool = False
    malformed: bool = False

    @property
    def refuted(self) -> bool:
        return self.model is not None or self.ill_typed or self.malformed

    def __str__(self) -> str:
        if self.model is not None:
            return f"{self.claim}: false for {', '.join(f'{k} = {v}' for k, v in self.model.items())}"
        if self.malformed:
            return self.claim
        return f"{self.claim}: {'ill-typed' if self.ill_typed else 'not proven'}"


class Proof(NamedTuple):
    """The axioms, lemmas and facts that a proof uses, or the failure if there is no proof."""

    axioms: tuple[str, ...] = ()
    failure: Failure | None = None

    @property
    def certified(self) -> bool:
        return self.failure is None


class UnprovenError(Exception):
    """The error of a claim that a proof needs and that does not follow."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def attempted(prove: Callable[[], Proof]) -> Proof:
    """Return the proof, or the failure that was raised on the way."""
    try:
        return prove()
    except UnprovenError as error:
        return Proof(failure=error.failure)
    except ShardwrightError as error:
        return Proof(failure=Failure(str(error)))
    except BEYOND as error:
        return Proof(failure=Failure(f"beyond these proofs: {type(error).__name__}: {error}"))
