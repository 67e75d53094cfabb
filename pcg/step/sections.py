"""Consecutive sections of a graph, some of which occur many times, and their spread over pipeline stages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from shardwright.pcg.checks import positive_int
from shardwright.pcg.errors import PlanError
from shardwright.pcg.step.chunk import Stretch
from shardwright.pcg.step.operation import Operation
from shardwright.pcg.step.operations import Operations


class Section(NamedTuple):
    """A section of consecutive operations.

    times     the number of occurrences, one after the other
    sent      values that later sections read, and the last of these sections; not values computed where they are read
    """

    name: str
    times: int
    stretch: Stretch
    sent: tuple[tuple[str, int], ...]


def sections(steps: Operations, repeats: Mapping[str, int], by_block: bool = False) -> list[Section]:
    """Cut at the repeated modules of `repeats`; with `by_block`, also at every other numbered block of the model.

    Raises:
        PlanError: no operator lies in a module, two modules are interleaved, or a number is below one.
    """
    names = _with_readers(steps, _names(steps.listed, repeats, by_block))
    named: list[tuple[str, list[Operation]]] = []
    for name, step in zip(names, steps.listed, strict=True):
        if not named or named[-1][0] != name:
            named.append((name, []))
        named[-1][1].append(step)
    for name in repeats:
        if (count := sum(n == name for n, _ in named)) != 1:
            problem = "no operator lies in it" if not count else "its operators lie between those of another"
            blocks = ", ".join(dict.fromkeys(s.block for s in steps.listed if s.block)) or "none"
            raise PlanError(f"repeats: {name!r}: {problem}; name one of the model's blocks: {blocks}")
    return list(_sections(named, steps, repeats))


def _names(all_steps: Sequence[Operation], repeats: Mapping[str, int], by_block: bool) -> list[str]:
    """Return the section of each step. A block goes from its first step to its last, whatever lies in between."""
    for name, times in repeats.items():
        positive_int(times, "repeats", repr(name), "how often the block occurs")
    keys = [_key(step, repeats, by_block) for step in all_steps]
    last = {key: i for i, key in enumerate(keys) if key}
    names: list[str] = []
    open_, until, number = "", -1, 0
    for i, key in enumerate(keys):
        if i > until and key and key != open_:
            open_, until = key, last[key]
        if i <= until:
            if key and key != open_:
                names.append(key)
                continue
            names.append(open_)
        else:
            if open_:
                open_, number = "", number + 1
            names.append(f"#{number}")
    return names


def _with_readers(steps: Operations, names: list[str]) -> list[str]:
    """Move constants of no block into the section after them, which reads them first."""
    if not any(name.startswith("#") and 0 < i < len(names) - 1 for i, name in enumerate(dict.fromkeys(names))):
        return names
    constants = set[str]()
    for node in steps.graph.nodes:
        if node.op in ("constant", "buffer") or not (
            node.is_leaf or node.may_draw or not constants.issuperset(node.inputs)
        ):
            constants.add(node.name)
    for i in range(len(names) - 2, -1, -1):
        if names[i].startswith("#") and names[i] != names[0] and steps.listed[i].name in constants:
            names[i] = names[i + 1]
    return names


def _key(step: Operation, repeats: Mapping[str, int], by_block: bool) -> str:
    for name in repeats:
        if step.module == name or step.module.startswith(f"{name}."):
            return name
    return step.block if by_block else ""


def _sections(
    named: Sequence[tuple[str, list[Operation]]], steps: Operations, repeats: Mapping[str, int]
) -> Iterable[Section]:
    home, last_reader, one = dict[str, int](), dict[str, int](), steps.in_one
    leaves = [set[str]() for _ in named]
    for number, (_, members) in enumerate(named):
        for step in members:
            for leaf in step.weights:
                leaves[home.setdefault(leaf, number)].add(leaf)
            last_reader |= dict.fromkeys(step.reads, number)
    for number, (name, members) in enumerate(named):
        made = {step.name: step for step in members}
        readers = {n: last_reader.get(n, number) for n in made if n in one}
        sent = tuple((n, last) for n, last in readers.items() if last > number)
        received = [n for s in members for n in s.reads if n not in made]
        times = repeats.get(name, 1)
        sendable = [n for n, _ in sent]
        carried = tuple(_carried(dict.fromkeys(received), sendable, steps)) if times > 1 else ()
        yield Section(name, times, Stretch(tuple(members), frozenset(leaves[number]), carried), sent)


def _carried(received: Iterable[str], sent: Iterable[str], steps: Operations) -> Iterable[tuple[str, str]]:
    """Yield pairs: a value that an occurrence reads, and the previous one's value for it, by type and in order."""
    left = list(sent)
    for name in received:
        same = (s for s in left if steps.graph.types[s] == steps.graph.types[name])
        if (match := next(same, None)) is not None:
            left.remove(match)
            yield name, match


def crossing(cut: Sequence[Section], number: int, inside: bool) -> set[str]:
    """Return the values that cross to the next stage behind a section's last occurrence; `inside`: behind another."""
    until = number if inside else number + 1
    crossing_values = {n for earlier in cut[: number + 1] for n, last in earlier.sent if last >= until}
    if not inside:
        return crossing_values
    replaced = dict(cut[number].stretch.carried)
    made = {step.name for step in cut[number].stretch.operations}
    return {n for n in crossing_values if n not in replaced and n not in made} | set(replaced.values())


# ---- over stages ----


Share = tuple[tuple[int, int], ...]
"""The share of one virtual stage: sections by number, each with a number of occurrences."""


def everything(cut: Sequence[Section]) -> Share:
    """Return the share of a single stage."""
    return tuple((number, section.times) for number, section in enumerate(cut))


def units(cut: Sequence[Section]) -> list[int]:
    """Return the section of every occurrence, in order."""
    return [number for number, section in enumerate(cut) for _ in range(section.times)]


def spread(cut: Sequence[Section], split: Sequence[int]) -> list[Share]:
    """Return the shares of virtual stages: occurrences of sections in order, as many as `split` gives each stage.

    Raises:
        PlanError: the split does not add up.
    """
    all_units = units(cut)
    if sum(split) != len(all_units) or min(split) < 1:
        expected = f"{len(split)} positive numbers that add up to {len(all_units)}"
        raise PlanError(f"split: expected {expected}, got {list(split)}; every virtual stage has at least one section")
    shares, start = list[Share](), 0
    for size in split:
        shares.append(tuple(Counter(all_units[start : start + size]).items()))
        start += size
    return shares


def shared(cut: Sequence[Section], one: Collection[str]) -> frozenset[str]:
    """Return the parameters that several sections read. Every stage that has one of these holds them, once."""
    needed, readers = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
    for number, section in reversed([*enumerate(cut)]):
        for o in reversed(section.stretch.operations):
            sections = {number} if o.name in one else needed[o.name]
            for name in o.reads:
                needed[name] |= sections
            for leaf in o.weights:
                readers[leaf] |= sections
    return frozenset(leaf for leaf, sections in readers.items() if len(sections) > 1)


Places = Mapping[str, tuple[int, Operation]]
"""Every operation of a cut by its name, with its place in the order in which they run."""


def places(cut: Sequence[Section]) -> Places:
    """Return the places of all operations."""
    operations = (o for section in cut for o in section.stretch.operations)
    return {o.name: (number, o) for number, o in enumerate(operations)}


def stretches(
    cut: Sequence[Section], share: Share, one: Collection[str], known: Places, drawn: Collection[str] = ()
) -> list[tuple[Stretch, int]]:
    """Return the stretches of a virtual stage: its share's, behind operations that it reads but is not sent.

    Operations outside of `one` that it does not read are left out, but for draws. `one`: the nodes `computed_in_one`
    stage; `known`: the cut's `places`; `drawn`: those `drawn_everywhere`.
    """
    cuts = [cut[number].stretch for number, _ in share]
    made = {o.name for stretch in cuts for o in stretch.operations}
    todo = [*drawn, *(name for stretch in cuts for o in stretch.operations if o.name in one for name in o.reads)]
    needed, before = set(todo), list[tuple[int, Operation]]()
    while todo:
        name = todo.pop()
        if name in known and name not in one:
            number, operation = known[name]
            before += [(number, operation)] if name not in made else []
            todo += (further := set(operation.reads) - needed)
            needed |= further
    before = sorted(dict(before).items())
    left = (tuple(o for o in stretch.operations if o.name in one or o.name in needed) for stretch in cuts)
    own_stretches = [(s._replace(operations=o), times) for s, o, (_, times) in zip(cuts, left, share, strict=True) if o]
    return [(Stretch(tuple(operation for _, operation in before)), 1), *own_stretches] if before else own_stretches
