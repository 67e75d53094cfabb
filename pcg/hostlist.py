"""Host lists as Slurm writes them: `node[01-03,07],gpu1` are five hosts; `4(x2),3` counts tasks on three nodes."""

from __future__ import annotations

import re
from itertools import product
from math import prod

from shardwright.pcg.errors import ClusterError

_MOST_HOSTS = 1_000_000


def hosts_of(text: str) -> tuple[str, ...]:
    """Return the names in a host list, in its order. Numbers in brackets keep their written width: `[08-11]`.

    Raises:
        ClusterError: brackets do not close or hold no numbers, a range falls, or there are over a million hosts.
    """
    hosts: list[str] = []
    for entry in _entries(text):
        pieces = re.split(r"\[([^\[\]]*)\]", entry)  # text, bracket, text, …
        if any(set(piece) & set("[] \t") for piece in pieces[::2]):
            raise _problem(text, f"{entry!r} is no name and no range")
        choices = [[p] if i % 2 == 0 else _numbers(p, text) for i, p in enumerate(pieces)]
        if len(hosts) + prod(map(len, choices)) > _MOST_HOSTS:
            raise _problem(text, "it names over a million hosts")
        hosts += ("".join(parts) for parts in product(*choices))
    if not hosts:
        raise _problem(text, "it names no host")
    return tuple(hosts)


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Return the number of tasks on each node, from Slurm's short form.

    Raises:
        ClusterError: an entry is neither `4` nor `4(x2)`.
    """
    counts: list[int] = []
    for entry in text.split(","):
        matched = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        times = int(matched[2] or 1) if matched else 0
        if matched is None or not 0 < times <= _MOST_HOSTS:
            raise ClusterError(f"tasks per node {text!r}: {entry!r} is no count; expected entries such as 4 or 4(x2)")
        counts += [int(matched[1])] * times
    return tuple(counts)


def _entries(text: str) -> list[str]:
    """Split at the commas outside brackets, and at ends of lines."""
    return [entry.strip() for entry in re.split(r"[,\n](?![^\[\]]*\])", text) if entry.strip()]


def _numbers(bracket: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in bracket.split(","):
        first, _, last = part.strip().partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal()) or int(last) < int(first):
            raise _problem(text, f"{part!r} is no range of numbers")
        if int(last) - int(first) >= _MOST_HOSTS:
            raise _problem(text, "it names over a million hosts")
        numbers += (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return numbers


def _problem(text: str, why: str) -> ClusterError:
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return ClusterError(f"host list {shown!r}: {why}; expected names and ranges such as node[01-08],gpu3")
