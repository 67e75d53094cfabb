"""A roll call after a collective has failed: which rank does not answer, and which is elsewhere.

In every rank a thread looks into the store of all ranks now and then. A rank whose collective fails calls; the threads
answer where their rank is in Python. One that does not answer was killed or stopped; one that is elsewhere is stuck
there. If all wait for others, or have lost one too, those are named that wait in another phase than the caller. A rank
that ends leaves word of its error.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from textwrap import shorten
from types import FrameType
from typing import NamedTuple
from weakref import ref

import torch.distributed as dist

from shardwright.lowering import private

INTERVAL_S, PATIENCE_S = 0.25, 1.5
"""The time between two looks into the store, and that which a rank has to answer."""
_KEY, _LAST = "shardwright/rollcall", 1 << 40
_AT, _ENDED = "is at ", "ended "
_LOST = f"{_KEY}/lost"
"""What ranks leave in the store: where they waited as they lost another one, or how they ended."""
_TORCH = str(Path(dist.__file__).parent.parent)
_WAITING = (f"{_TORCH}/distributed/", f"{Path(private.__file__).parent}/", str(Path(__file__).with_name("waits.py")))
_NO_PLACE = (f"{_TORCH}/", str(Path(threading.__file__).parent))
"""Files of torch and Python, which say little about what a rank does."""


Phase = str | Callable[[], str]
"""A phase of a run in words, or what returns them."""
_PHASES = list[Phase]()
"""The phases that this process is in, the innermost last."""
_LAST_WORDS = dict[int, str]()
"""How other ranks ended, read as the store was about to end with one of them."""


@contextmanager
def phase_of_run(phase: Phase) -> Generator[None]:
    """Tell other ranks that this one is in a phase, where it waits."""
    _PHASES.append(phase)
    try:
        yield
    finally:
        _PHASES.remove(phase)


class Answer(NamedTuple):
    """A rank's answer: where it is in words, and the instructions of Python that its threads are at."""

    words: str
    instructions: list[int]


Answers = Mapping[int, Answer | None]
"""The answers of other ranks by number; None where there is none."""


class _Listener(threading.Thread):
    """Answers for this rank while the process group lives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(name="shardwright roll call", daemon=True)
        self._group, self._rank, self._ended = ref(group), dist.get_rank(), threading.Event()
        self._kept = private.world_store()  # rank 0's may be the server, which others ask until they know better
        self._answered = 0
        # a wait of the main thread blocks its own connection only
        self._store: private.Store = self._kept.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._store.delete_key(f"{_LOST}/{self._rank}")  # of an earlier group over this store
        _LAST_WORDS.clear()

    def is_of(self, group: dist.ProcessGroup) -> bool:
        """Return whether this thread answers for the rank in a process group."""
        return self._group() is group and self.is_alive()

    def run(self) -> None:
        """Answer every call, until the rank leaves, or the store is gone or about to be."""
        with suppress(RuntimeError):
            while not self._ended.wait(INTERVAL_S) and dist.group.WORLD is self._group():
                if (calls := self._store.add(_KEY, 0)) >= _LAST:
                    _LAST_WORDS.update(_ends(self._store))
                    return
                for call in range(self._answered + 1, calls + 1):
                    self._store.set(f"{_KEY}/{call}/{self._rank}", json.dumps(_whereabouts()))
                    self._answered = call

    def end(self) -> None:
        """Answer no more, and leave word. A process that has the store lets the others know: torch logs later calls."""
        self._ended.set()
        self.join(PATIENCE_S)
        with suppress(RuntimeError):
            if not self._store.check([key := f"{_LOST}/{self._rank}"]):
                self._store.set(key, _last_words())
            if _is_server(self._kept):
                self._store.add(_KEY, _LAST)
                time.sleep(1.5 * INTERVAL_S)


_LISTENING = list[_Listener]()
"""The thread of this process, if it has one."""


def listen() -> None:
    """Answer roll calls of this process group from now on."""
    world = dist.group.WORLD
    if world is None or dist.get_world_size() == 1 or dist.get_backend() == private.FAKE:
        return
    if any(listener.is_of(world) for listener in _LISTENING):
        return
    leave()
    _LISTENING.append(_Listener(world))
    _LISTENING[0].start()


def leave() -> None:
    """Answer roll calls no more."""
    while _LISTENING:
        _LISTENING.pop().end()


def culprits() -> str:
    """Call all ranks; return in words which ended or do not answer, or else where they are.

    Returns "" where all wait as this one does. Where ranks wait counts only if all do: they may wait for one that is
    elsewhere. This rank counts as one that has lost another from now on.
    """
    if not dist.is_initialized() or not _LISTENING:
        return ""
    try:
        private.world_store().set(f"{_LOST}/{dist.get_rank()}", _wait())
        answers = _answers(private.world_store())
    except RuntimeError:
        return _in_words(_LAST_WORDS) or (
            "the store of all ranks does not answer: the process that holds it, mostly rank 0, was killed or stopped"
        )
    if words := _gone(answers):
        return words
    where = {rank: answer.words for rank, answer in answers.items() if answer and answer.words != _wait()}
    return _in_words({rank: place for rank, place in where.items() if place.startswith(_AT)} or where)


def standstill() -> Answers | None:
    """Call all ranks; return their answers, or None where one computes that could come to where this rank waits.

    A rank that works on a step answers differently from call to call. The caller goes on waiting, so the others do not
    hear that it has lost a rank.
    """
    if not _LISTENING:
        return None
    answers = _answers(private.world_store())
    if any(answer is not None and answer.words.startswith(_AT) for answer in answers.values()):
        return None
    here = Answer(_wait(), [])
    return {rank: here if answer and answer.words == here.words else answer for rank, answer in answers.items()}


def has_ended(answers: Answers) -> bool:
    """Return whether a rank has left word of its end."""
    return any(answer is not None and answer.words.startswith(_ENDED) for answer in answers.values())


def _gone(answers: Answers) -> str:
    """Return in words which ranks ended, or do not answer."""
    words = {rank: answer.words for rank, answer in answers.items() if answer}
    if ended := {rank: text for rank, text in words.items() if text.startswith(_ENDED)}:
        return _in_words(ended)
    silent = [rank for rank, answer in answers.items() if answer is None]
    return f"{_ranks(silent)} not answer: killed, stopped or gone" if silent else ""


def _in_words(where: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank} {place}" for rank, place in where.items())


def _ends(store: private.Store) -> dict[int, str]:
    """Return how other ranks ended, as far as they left word."""
    keys = {rank: f"{_LOST}/{rank}" for rank in range(dist.get_world_size()) if rank != dist.get_rank()}
    words = {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
    return {rank: text for rank, text in words.items() if text.startswith(_ENDED)}


def _last_words() -> str:
    """Return how this process ends: Python keeps the error that nothing has caught."""
    error = getattr(sys, "last_value", None)
    return f"{_ENDED}with {type(error).__name__}: {shorten(str(error), 300)}" if error else f"{_ENDED}its run"


def _answers(store: private.Store) -> Answers:
    """Return where other ranks are, or where they waited as they lost a rank; None where they do not answer."""
    me = dist.get_rank()
    others = [rank for rank in range(dist.get_world_size()) if rank != me]
    call = store.add(_KEY, 1)
    keys = {rank: f"{_KEY}/{call}/{rank}" for rank in others}
    lost = {rank: f"{_LOST}/{rank}" for rank in others}
    awaited = [keys[rank] for rank in others if not store.check([lost[rank]])]
    with suppress(RuntimeError):
        store.wait(awaited, timedelta(seconds=PATIENCE_S))
    answers = dict[int, Answer | None]()
    for rank in others:
        if store.check([lost[rank]]):
            answers[rank] = Answer(store.get(lost[rank]).decode(), [])
        else:
            answers[rank] = Answer(*json.loads(store.get(keys[rank]))) if store.check([keys[rank]]) else None
    return answers


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]} does" if len(numbers) == 1 else f"ranks {list(numbers)} do"


def _whereabouts() -> Answer:
    """Return where this process's main thread is in Python, or in which phase one of its threads waits for others."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    main = frames.get(threading.main_thread().ident or 0)
    waits = any(frame.f_code.co_filename.startswith(_WAITING) for frame in frames.values())
    instructions = [each.f_lasti for frame in frames.values() for each in _stack(frame)]
    return Answer(_wait() if waits or main is None else f"{_AT}{_place(main)}", instructions)


def _wait() -> str:
    phase = _PHASES[-1] if _PHASES else "a collective"
    return f"waits in {phase if isinstance(phase, str) else phase()}"


def _place(frame: FrameType) -> str:
    stack = list(_stack(frame))
    place = next((f for f in stack if not f.f_code.co_filename.startswith(_NO_PLACE)), stack[0])
    return f"{place.f_code.co_filename}:{place.f_lineno} in {place.f_code.co_name}"


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_server(store: private.Store) -> bool:
    """Return whether other processes reach a store through this one."""
    while isinstance(store, private.PrefixStore):
        store = store.underlying_store
    return repr(store).startswith("TCPStore(") and "server=<nullptr>" not in repr(store)  # which alone tells it
