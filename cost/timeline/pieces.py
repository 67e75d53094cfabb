"""Pairs of a move and products in pieces: the cost of an operation's pieces, and their tasks.

    the move first    while a piece is computed, the next one travels; then results are put together
    the move last     while a piece travels, the next one is computed; then what arrived is put together

The order is that of `lowering/runtime/pieces.py`: one piece is in flight, and a kernel waits for all that were launched
before the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwright.cost.timeline.tasks import COMPUTE, Recorder
from shardwright.pcg.step.messages import Message


class Piece(NamedTuple):
    """One pass of an operation of a pair: one of its pieces, and what follows the last one.

    stream          compute, or the mesh axis of a collective
    messages        of a piece
    joined_bytes    of the value that its pieces are put together to, by a copy of `joined_s`; 0: nothing is
    """

    stream: str = COMPUTE
    seconds: float = 0.0
    messages: tuple[Message, ...] = ()
    joined_bytes: float = 0.0
    joined_s: float = 0.0

    def whole_s(self, count: int) -> float:
        """Return the seconds of all pieces, one after the other."""
        return count * self.seconds + self.joined_s


class Pieces(NamedTuple):
    """The pieces of an operation of a pair.

    number     its place among the `length` operations of the pair
    num        of the pieces
    """

    number: int
    length: int
    num: int
    is_move: bool
    forward: Piece
    backward: Piece


class Ran(NamedTuple):
    """The tasks of an operation's pieces: the first one, that which makes the result, and the last one."""

    first: int
    made: int
    last: int


def record(
    recorder: Recorder, members: Sequence[tuple[str, Pieces]], *, backward: bool = False, suffix: str = ""
) -> list[Ran]:
    """Record operations of a pair, given by name in the order of their turns, and return the tasks of each."""
    recorded = [
        _Member(recorder, name + suffix, p.is_move, p.backward if backward else p.forward) for name, p in members
    ]
    count, (first, *_) = members[0][1].num, recorded
    moves, products = ([member for member in recorded if member.is_move == is_move] for is_move in (True, False))
    for move in moves if first.is_move else ():
        move.run()
    for number in range(count):
        for move in moves if first.is_move else ():
            move.wait()
            if number + 1 < count:
                move.run()
        for product in products:
            product.run()
        for move in () if first.is_move else moves:
            move.wait()
            move.run()
    for move in () if first.is_move else moves:
        move.wait()
    return [member.join() for member in recorded]


class _Member:
    def __init__(self, recorder: Recorder, name: str, is_move: bool, piece: Piece) -> None:
        self.recorder, self.name, self.is_move, self.piece = recorder, name, is_move, piece
        self.tasks: list[int] = []

    def run(self) -> None:
        name, (stream, seconds, messages, *_) = self.name, self.piece
        if stream == COMPUTE:
            self.tasks.append(self.recorder.compute(name, seconds))
        else:
            self.tasks.append(self.recorder.launch(name, stream, seconds, blocks=False, messages=messages))

    def wait(self) -> None:
        """Let the next kernel wait for what was launched last."""
        if self.piece.stream != COMPUTE:
            self.recorder.await_(self.tasks[-1:])

    def join(self) -> Ran:
        """Put the pieces together, whose memory is given back then."""
        recorder, name, (first, *_) = self.recorder, self.name, self.tasks
        if not self.piece.joined_bytes:
            return Ran(first, first, self.tasks[-1])
        joined = recorder.compute(name, self.piece.joined_s)
        recorder.take("temporary", self.piece.joined_bytes, first, (joined,), name=f"pieces of {name}")
        return Ran(first, joined, joined)
