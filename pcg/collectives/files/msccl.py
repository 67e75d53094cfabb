"""MSCCL's XML: an `algo` of `gpu`s, of thread blocks `tb`, of `step`s. Read, checked for its form, and written.

The format is what its readers take: Azure/msccl-executor-nccl c6f6b36d (src/misc/msccl/msccl_parser.cc) and, for files
of 2021 and 2022, microsoft/msccl b23e9cd5. Those readers let offsets and channels beyond their ends through; this one
does not. `verifier.collectives.verify_program` says whether a program is right.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from shardwright.pcg.collectives.files.documents import Element, read_xml
from shardwright.pcg.collectives.program import NO_PEER, OPS, Block, Buffer, Place, Program, RankProgram, Step
from shardwright.pcg.errors import ScheduleError

PROTOCOLS = ("Simple", "LL", "LL128")
MOST_RANKS, MOST_CHANNELS, MOST_CHUNKS = 4096, 32, 1 << 20
MOST_BLOCKS, MOST_STEPS, MOST_COUNT, MOST_PEERS = 1024, 256, 71, 32
COLLECTIVES: Mapping[str, str] = {
    "allgather": "all_gather", "reducescatter": "reduce_scatter", "allreduce": "all_reduce", "broadcast": "broadcast",
    "reduce": "reduce", "gather": "gather", "scatter": "scatter", "alltoall": "all_to_all",
}  # fmt: skip
NAMES = {ours: theirs for theirs, ours in COLLECTIVES.items()}
BUFFERS: Mapping[str, Buffer] = {"i": "input", "o": "output", "s": "scratch"}
LETTERS = {buffer: letter for letter, buffer in BUFFERS.items()}


def read_msccl(text: str, source: str = "XML", root: int = 0) -> Program:
    """Return the program of an MSCCL file. `root`: of a broadcast, reduce, gather or scatter, which files do not say.

    Raises:
        ScheduleError: naming the line, what was expected, what was found and what to do.
    """
    algo = read_xml(text, source)
    if algo.tag != "algo":
        raise algo.error("expected an algo as the root; is it an MSCCL file?")
    num_ranks = algo.number("ngpus", 1, MOST_RANKS)
    in_place = bool(algo.number("inplace", 0, 1))
    if algo.text("proto") not in PROTOCOLS:
        raise algo.error(f"proto: expected one of {', '.join(PROTOCOLS)}, got {algo.text('proto')[:40]!r}; choose one")
    name = algo.text("coll")
    program = Program(
        name=algo.text("name"),
        kind=COLLECTIVES.get(name.replace("_", "").lower(), name),
        num_chunks=algo.number("nchunksperloop", 1, MOST_CHUNKS),
        ranks=tuple(_rank(gpu, num_ranks) for gpu in _by_number(algo, "gpu", "id", num_ranks)),
        in_place=in_place,
        out_of_place=bool(algo.number("outofplace", 0, 1, int(not in_place))),
        protocol=algo.text("proto"),
        num_channels=algo.number("nchannels", 1, MOST_CHANNELS),
        min_bytes=algo.number("minBytes", 0, 1 << 62, 0),
        max_bytes=algo.number("maxBytes", 0, 1 << 62, 0),
        root=root,
    )
    check_form(program, source)
    return program


def write_msccl(program: Program) -> str:
    """Return a program as MSCCL's XML, which the readers of Azure and RCCL take.

    Raises:
        ScheduleError: the format cannot say it: too many chunks, steps or channels, or a name with other characters.
    """
    check_form(program, program.name)
    if not program.name.isascii() or not program.name.isprintable() or set(program.name) & set("<>&\"'"):
        raise ScheduleError(f"{program.name}: expected a name of plain characters without quotes and <>&; rename it")
    lines = [f"<algo {_attributes(_algo(program))}>"]
    for rank, one in enumerate(program.ranks):
        sizes = {"id": rank, "i_chunks": one.input_chunks, "o_chunks": one.output_chunks,
                 "s_chunks": one.scratch_chunks}  # fmt: skip
        lines.append(f"  <gpu {_attributes(sizes)}>")
        lines += [f'    <copy i_off="{of}" o_off="{to}"/>' for of, to in one.copies]
        for index, block in enumerate(one.blocks):
            ends = {"id": index, "send": block.send, "recv": block.receive, "chan": block.channel}
            lines.append(f"    <tb {_attributes(ends)}>")
            lines += [
                f"      <step {_attributes(_step_fields(number, step))}/>" for number, step in enumerate(block.steps)
            ]
            lines.append("    </tb>")
        lines.append("  </gpu>")
    return "\n".join((*lines, "</algo>", ""))


def check_form(program: Program, source: str) -> None:
    """Raise `ScheduleError` unless MSCCL can hold the program: its limits, and its rules for steps that only wait."""
    for rank, one in enumerate(program.ranks):
        peers = defaultdict[int, Counter[str]](Counter)
        for index, block in enumerate(one.blocks):
            where = f"{source}: gpu {rank}, tb {index}"
            if not 0 <= block.channel < program.num_channels:
                expected = f"a channel below nchannels = {program.num_channels}"
                raise ScheduleError(f"{where}: expected {expected}, got {block.channel}; correct one of them")
            peers[block.channel] += Counter(end for end, peer in (("send", block.send), ("recv", block.receive))
                                            if peer != NO_PEER)  # fmt: skip
            for number, problem in _step_problems(block):
                raise ScheduleError(f"{where}, step {number}: {problem}")
        crowded = next((channel for channel, ends in peers.items() if max(ends.values(), default=0) > MOST_PEERS), None)
        if crowded is not None or len(one.blocks) > MOST_BLOCKS:
            most = f"at most {MOST_BLOCKS} blocks, and {MOST_PEERS} peers on a channel"
            raise ScheduleError(f"{source}: gpu {rank}: expected {most}, got more; use more channels or fewer blocks")


def _step_problems(block: Block) -> Iterator[tuple[int, str]]:
    if len(block.steps) > MOST_STEPS:
        yield MOST_STEPS, f"expected at most {MOST_STEPS} steps in a tb, got {len(block.steps)}; use more channels"
    for number, step in enumerate(block.steps):
        if not 0 <= step.num_chunks <= MOST_COUNT:
            yield number, f"cnt: expected 0 to {MOST_COUNT}, got {step.num_chunks}; split the step"
        if step.op == "nop":
            following = next((later for later in block.steps[number + 1 :] if later.op != "nop"), None)
            if following is None and step.awaited:
                yield number, "expected no nop at the end that others wait for: readers drop it; remove it"
            if following is not None and following.after is None:
                yield number, "expected a step with a depid behind a nop, got one without; wait there for the last one"


def _by_number(parent: Element, tag: str, attribute: str, size: int, others: tuple[str, ...] = ()) -> list[Element]:
    """Return children that have the numbers 0, 1, … each once, in that order."""
    by_number = dict[int, Element]()
    for child in parent.only(tag, *others):
        if child.tag == tag:
            number = child.number(attribute, 0, size - 1)
            if number in by_number:
                raise child.error(f"expected each {attribute} once, got {number} again; renumber them")
            by_number[number] = child
    missing = next(
        (number for number in range(size if tag == "gpu" else len(by_number)) if number not in by_number), None
    )
    if missing is not None:
        raise parent.error(f"expected {tag}s with each {attribute} from 0, got none with {missing}; renumber them")
    return [by_number[number] for number in range(len(by_number))]


def _rank(gpu: Element, num_ranks: int) -> RankProgram:
    copies = tuple(
        (copy.number("i_off", 0, MOST_CHUNKS), copy.number("o_off", 0, MOST_CHUNKS))
        for copy in gpu.only("tb", "copy")
        if copy.tag == "copy"
    )
    inputs, outputs, scratch = (gpu.number(f"{letter}_chunks", 0, MOST_CHUNKS) for letter in "ios")
    blocks = _by_number(gpu, "tb", "id", MOST_BLOCKS, ("copy",))
    return RankProgram(inputs, outputs, scratch, tuple(_block(tb, num_ranks) for tb in blocks), copies)


def _block(tb: Element, num_ranks: int) -> Block:
    steps = _by_number(tb, "step", "s", MOST_STEPS)
    if steps != tb.children:
        raise tb.error("expected its steps in their order; sort them by s")
    send, receive = (tb.number(end, NO_PEER, num_ranks - 1) for end in ("send", "recv"))
    return Block(send, receive, tb.number("chan", 0, MOST_CHANNELS - 1), tuple(map(_step, steps)))


def _step(step: Element) -> Step:
    op = step.text("type")
    if op not in OPS:
        raise step.error(f"type: expected one of {', '.join(OPS)}, got {op[:40]!r}; use one of them")
    block = step.number("depid", -1, MOST_BLOCKS - 1)
    number = step.number("deps", -1, MOST_STEPS - 1)
    if block >= 0 > number:
        raise step.error(f"deps: expected a step of tb {block}, got -1; correct it, or set depid to -1")
    source, destination = (_place(step, end) for end in ("src", "dst"))
    after = (block, number) if block >= 0 else None
    awaited = bool(step.number("hasdep", 0, 1))
    return Step(op, source, destination, step.number("cnt", 0, MOST_COUNT), after, awaited)


def _place(step: Element, end: str) -> Place:
    letter = step.text(f"{end}buf")
    if letter not in BUFFERS:
        raise step.error(f"{end}buf: expected i, o or s, got {letter[:40]!r}; choose one of them")
    return Place(BUFFERS[letter], step.number(f"{end}off", -1, MOST_CHUNKS))


def _algo(program: Program) -> dict[str, object]:
    return {
        "name": program.name, "proto": program.protocol, "nchannels": program.num_channels,
        "nchunksperloop": program.num_chunks, "ngpus": program.num_ranks,
        "coll": NAMES.get(program.kind, program.kind), "inplace": int(program.in_place),
        "outofplace": int(program.out_of_place), "minBytes": program.min_bytes, "maxBytes": program.max_bytes,
    }  # fmt: skip


def _step_fields(number: int, step: Step) -> dict[str, object]:
    block, awaited = step.after or (-1, -1)
    (source, at), (destination, to) = step.source, step.destination
    return {
        "s": number, "type": step.op, "srcbuf": LETTERS[source], "srcoff": at, "dstbuf": LETTERS[destination],
        "dstoff": to, "cnt": step.num_chunks, "depid": block, "deps": awaited, "hasdep": int(step.awaited),
    }  # fmt: skip


def _attributes(fields: Mapping[str, object]) -> str:
    return " ".join(f'{name}="{value}"' for name, value in fields.items())
