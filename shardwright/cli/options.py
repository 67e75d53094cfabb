"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import reduce, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from shardwright.pcg.dtypes import dtype_named
from shardwright.pcg.encodings import Encodings, canonical
from shardwright.pcg.errors import MachineError, ShardwrightError
from shardwright.pcg.files import require_writable
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import REDUCE_DTYPES
from shardwright.pcg.step.optimizers import OPTIMIZERS, Optimizer, optimizer_named
from shardwright.pcg.step.pipelining import SCHEDULES
from shardwright.pcg.step.precisions import PRECISIONS, Precision, PrecisionMode, precision_named
from shardwright.search.request.encodings import EXACT, EncodingsLike, allowed, parse

if TYPE_CHECKING:
    from shardwright.cost.clusters.cluster import Cluster
    from shardwright.search.request.asked import OffloadMode, RecomputeMode, Stages

Command = TypeVar("Command", bound=Callable[..., object])
CLUSTER_FORMS = (
    "local:N (N CPU ranks of this machine), preset:NAME[:NODES[:GPUS]] (such as preset:dgx-h100:8, preset:dgx-h100:1:4 "
    "for four GPUs of one, or preset:dgx-h100:4+l40s-box:1:4 for machines of several kinds), detect, or a cluster file."
)
DTYPES = ("float32", "bfloat16", "float16", "float64")
WHAT_IF = ("nodes", "bandwidth", "memory", "flops", "batch", "seq")
PATH = click.Path(path_type=Path)
FILE_PATH = click.Path(dir_okay=False, path_type=Path)
COLLECTIVES_HELP = (
    "What collectives may run by beside the library's own algorithms: schedules that are synthesized for the networks "
    "of groups, or those of a folder (`collectives build -o`). The plan has those that it runs."
)
CLUSTER_HELP = f"What to plan for: {CLUSTER_FORMS}"


class Number(click.FloatRange):
    """A finite number in a range. Click's own ranges accept `nan`, for which every comparison is false."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 - as click has it
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


plan_argument = click.argument("plan_file", metavar="PLAN.json", type=FILE_PATH)
rules_argument = click.argument("file", required=False, type=PATH, metavar="[FILE]")


def examples(*commands: str) -> str:
    """Return the end of a command's help: its examples."""
    title = "Examples" if len(commands) > 1 else "Example"
    return "\n".join(["\b", f"{title}:", *(f"  shardwright {command}" for command in commands)])


def parse_cluster(text: str) -> Cluster:
    """Return the cluster that an option names; raise `ShardwrightError` where it names none."""
    from shardwright.cost.clusters.cluster import Cluster

    kind, _, rest = text.partition(":")
    if kind == "local":
        return Cluster.local(
            _number(rest or "1", f"--cluster {text}: local:N wants a number of ranks, such as local:2")
        )
    if kind == "preset":
        return _preset(text, rest)
    if text == "detect":
        return Cluster.detect()
    if not Path(text).exists() and not text.endswith(".json"):
        raise ShardwrightError(
            f"--cluster {text!r} is no cluster: give local:N, preset:NAME[:NODES[:GPUS]], detect or a cluster file"
        )
    return Cluster.load(text)


def _preset(text: str, rest: str) -> Cluster:
    """Return the cluster of `NAME[:NODES[:GPUS]]`, several of which are joined by + or a comma."""
    from shardwright.cost.clusters.cluster import Cluster
    from shardwright.cost.clusters.presets import machine_named

    machines: list[tuple[str, int, int] | tuple[str, int]] = []
    for entry in rest.replace(",", "+").split("+"):
        name, *counts = entry.split(":")
        if not name or len(counts) > 2:
            wants = "preset:NAME[:NODES[:GPUS]] and each part beside a + want the name of a machine"
            raise ShardwrightError(f"--cluster {text}: {wants}, such as preset:dgx-h100:4+l40s-box:1:4")
        problem = f"--cluster {text}: preset:NAME:NODES:GPUS wants a number of machines, and of GPUs in each"
        nodes, *gpus = [_number(count or "1", problem) for count in counts or ["1"]]
        machines.append((machine_named(name), nodes, gpus[0]) if gpus else (machine_named(name), nodes))
    if len(machines) > 1:
        return Cluster.mixed(machines)
    name, nodes, *gpus = machines[0]
    return Cluster.preset(name, nodes, gpus[0] if gpus else None)


def _number(text: str, problem: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ShardwrightError(problem)
    return int(text)


def parse_mesh(text: str) -> Mesh:
    """Return the mesh of `dp=2,tp=4`, outermost axis first."""
    pairs = [part.partition("=") for part in text.replace(" ", "").split(",")]
    if not all(name and size.isdecimal() for name, _, size in pairs):
        raise ShardwrightError(f"--mesh {text!r} is no mesh: give axes and sizes such as dp=2,tp=4")
    return Mesh(tuple(name for name, _, _ in pairs), tuple(int(size) for _, _, size in pairs))


def parse_roles(text: str) -> Sequence[str]:
    """Return the roles of axes in `data,tensor`."""
    return text.replace(" ", "").split(",")


def cluster_option(command: Command) -> Command:
    """Add `--cluster` to a command, and `--collectives`, which says by what schedules its collectives may run."""

    @wraps(command)
    def on_cluster(*args: Any, cluster: Cluster, collectives: str | None, **words: Any) -> Any:  # noqa: ANN401
        chosen = cluster if collectives is None else cluster.with_schedules(collectives)
        return command(*args, cluster=chosen, **words)

    named = click.option(
        "--cluster", type=parse_cluster, metavar="CLUSTER", default="local:2", show_default=True, help=CLUSTER_HELP
    )
    scheduled = click.option("--collectives", metavar="synthesized|FOLDER", help=COLLECTIVES_HELP)
    return cast("Command", named(scheduled(on_cluster)))


def format_option(command: Command) -> Command:
    """Add `--format text|json|markdown` to a command."""
    choice = click.Choice(["text", "json", "markdown"])
    return click.option("--format", "form", type=choice, default="text", show_default=True, help="Form of the result.")(
        command
    )


def output_option(text: str) -> Callable[[Command], Command]:
    """Return a decorator that adds `--output`; `text` says what is written."""
    return click.option("--output", "-o", type=FILE_PATH, callback=writable, help=text)


def writable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Return the path; raise `MachineError`, before the work begins, if it cannot be written."""
    if path is not None:
        require_writable(path, "the result", MachineError)
    return path


def precision_option(command: Command) -> Command:
    """Add `--precision` to a command."""
    text = (
        f"What is computed in which dtype: {', '.join(PRECISIONS)}; amp_bf16 is as torch.autocast has it, bf16_params "
        "as FSDP2's MixedPrecisionPolicy(param_dtype=torch.bfloat16). Or by module: 'lm_head=fp32,*=amp_bf16', of "
        "which the first that fits decides. By default the model's own. Given several times, the search chooses."
    )
    none = lambda context, parameter, given: given or None  # noqa: E731
    return click.option(
        "--precision", type=parse_precision, metavar="PRECISION", multiple=True, callback=none, help=text
    )(command)


def reduce_dtype_option(command: Command) -> Command:
    """Add `--reduce-dtype` to a command."""
    text = (
        f"What gradients are sent in, to be summed over devices: {', '.join(REDUCE_DTYPES)}. By default the dtype of "
        "the parameters."
    )
    return click.option("--reduce-dtype", type=parse_reduce_dtype, metavar="DTYPE", help=text)(command)


def optimizer_option(otherwise: str = "") -> Callable[[Command], Command]:
    """Return a decorator that adds `--optimizer` to a command."""
    text = f"The optimizer whose states are predicted, {', '.join(OPTIMIZERS)} (AdamW's are Adam's){otherwise}."
    return click.option("--optimizer", type=parse_optimizer, metavar="NAME", help=text)


def parse_optimizer(text: str) -> Optimizer:
    """Return the optimizer of `adafactor`, or of an alias such as `AdamW`."""
    return optimizer_named(text, "", "--optimizer")


def parse_reduce_dtype(text: str) -> str:
    """Return the dtype of `bfloat16`, or of an alias such as `bf16`."""
    return dtype_named(text, "", "--reduce-dtype", REDUCE_DTYPES)


def parse_encodings(text: str) -> EncodingsLike:
    """Return what `auto`, `int8,int4` or `weights=int8,gradients=int4` says."""
    encodings = parse(text)
    allowed(encodings)
    return encodings


def parse_sent(text: str) -> Encodings:
    """Return the encodings of `weights=int8,gradients=int4`, or none for `exact`."""
    pairs = [] if text == EXACT else [part.split("=", 1) for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise click.BadParameter(f"expected '{EXACT}' or pairs such as weights=int8, got {text!r}")
    return canonical([(what, name) for what, name in pairs], "--encodings")


def parse_dtype(text: str) -> str:
    """Return a dtype for the weights of a config."""
    return dtype_named(text, "", "--dtype", DTYPES)


def parse_one_precision(text: str) -> Precision:
    """Return the precision of `amp_bf16`, or of an alias such as `bf16-mixed`."""
    return precision_named(text, "", "--precision")


def parse_precision(text: str) -> PrecisionMode:
    """Return the precision of `amp_bf16`, or the precisions by module of `lm_head=fp32,*=amp_bf16`."""
    if "=" not in text:
        return parse_one_precision(text)
    return cast("PrecisionMode", _by_name(text, "--precision", "a precision, or pairs such as 'lm_head=fp32'"))


def parse_recompute(text: str) -> RecomputeMode:
    """Return the mode of `full`, of pairs such as `model.layers.0-7=full`, or of `explain --recompute`'s JSON."""
    return cast("RecomputeMode", _by_block(text, "--recompute"))


def parse_offload(text: str) -> OffloadMode:
    """Return the same of what waits on the host, as `explain --offload` prints it."""
    return cast("OffloadMode", _by_block(text, "--offload"))


def _by_block(text: str, option: str) -> object:
    if text.lstrip().startswith(("{", '"')):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ShardwrightError(f"{option}: expected JSON, got: {error}; `explain {option}` prints it") from None
    return _by_name(text, option, "a mode, or pairs such as 'model.layers.*=full'") if "=" in text else text


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the number of devices that each stage has along the first axis, from a text such as "2,1"."""
    parts = text.split(",")
    if all(part.isdecimal() and int(part) for part in parts):
        return tuple(map(int, parts))
    raise ShardwrightError(f"--stage-sizes {text!r}: expected a number of devices for each stage, such as 2,1")


def parse_stages(text: str) -> Stages:
    """Return a number of pipeline stages, the devices of each ("4,2"), or "auto"."""
    if text == "auto" or (text.isdecimal() and int(text)):
        return "auto" if text == "auto" else int(text)
    parts = text.split(",")
    if len(parts) > 1 and all(part.isdecimal() and int(part) for part in parts):
        return tuple(map(int, parts))
    raise ShardwrightError(
        f"--stages {text!r}: expected a number of pipeline stages, the devices of each such as 4,2, or 'auto'"
    )


def parse_pad(text: str) -> bool | int:
    """Return a number of devices, or True for "auto"."""
    if text == "auto" or (text.isdecimal() and int(text)):
        return text == "auto" or int(text)
    raise ShardwrightError(f"--pad {text!r}: expected a number of devices, or 'auto' for those of an axis")


def parse_changes(text: str) -> dict[str, str]:
    """Return the changes in `nodes=2x,batch=128`, by quantity."""
    changes = _by_name(text, "--what-if", "changes such as nodes=2x,bandwidth=0.5x")
    unknown = [name for name in changes if name not in WHAT_IF]
    if unknown:
        raise ShardwrightError(f"--what-if: {unknown[0]!r} cannot be changed; choose among {', '.join(WHAT_IF)}")
    return changes


def _by_name(text: str, option: str, wanted: str) -> dict[str, str]:
    """Return the words of `NAME=WORD,NAME=WORD` by name; raise an error that says what is `wanted`."""
    pairs = [part.rpartition("=") for part in text.replace(" ", "").split(",")]
    names = [name for name, _, _ in pairs]
    if not all(name and word for name, _, word in pairs) or len(set(names)) < len(names):
        raise ShardwrightError(f"{option} {text!r}: give {wanted}, each name once")
    return {name: word for name, _, word in pairs}


def microbatches_option(command: Command) -> Command:
    """Add `--microbatches` to a command."""
    text = "Microbatches of a step, whose gradients are accumulated; by default the search chooses."
    return click.option("--microbatches", type=click.IntRange(1), help=text)(command)


def per_microbatch_option(command: Command) -> Command:
    """Add `--per-microbatch` to a command."""
    text = (
        "Modules, by name or pattern ('*': all), whose statistics over the batch (batch norm, balancing losses) are "
        "taken of each microbatch by itself, which makes it another step; needs --microbatches. May be repeated."
    )
    return click.option(
        "--per-microbatch", multiple=True, metavar="MODULE", help=text, callback=lambda _, __, names: names or None
    )(command)


def check_capture_option(default: str) -> Callable[[Command], Command]:
    """Add `--check-capture` to a command."""
    text = (
        "first: compare one eager step of the model with its captured graph, on the model's own values, and refuse a "
        "graph that computes something else. never: leave it out."
    )
    values = click.Choice(("first", "never"))
    return click.option("--check-capture", type=values, default=default, show_default=True, help=text)


def recompute_option(command: Command) -> Command:
    """Add `--recompute` to a command."""
    text = (
        "What backward computes again: none, selective (attention) or full (every block); or by block or module in "
        "blocks, such as 'model.layers.0-7=full,model.layers.*.mlp=full'; or JSON, which says it by value, as `explain "
        "--recompute` prints it. By default the search does, by value."
    )
    return click.option("--recompute", type=parse_recompute, metavar="MODE", help=text)(command)


def offload_option(command: Command) -> Command:
    """Add `--offload` to a command."""
    text = (
        "What waits for backward in the host's memory: none or full (all that is kept); or by block or module in "
        "blocks, such as 'model.layers.0-7=full'; or JSON, which says it by value, as `explain --offload` prints it. "
        "By default nothing does, unless nothing fits without and devices have a link to that memory."
    )
    return click.option("--offload", type=parse_offload, metavar="MODE", help=text)(command)


def search_options(command: Command) -> Command:
    """Add options that guide the search, as one mapping `search` of arguments of `shardwright.plan`."""
    return together(
        command,
        "search",
        mesh=click.option(
            "--mesh", type=parse_mesh, metavar="MESH", help="Search on this mesh only, such as dp=2,tp=4."
        ),
        roles=click.option(
            "--roles",
            type=parse_roles,
            metavar="ROLES",
            help="What each axis of devices of --mesh may do: "
            "data, zero, expert, context, ulysses, ring, tensor or free.",
        ),
        microbatches=microbatches_option,
        recompute=recompute_option,
        offload=offload_option,
        pieces=click.option(
            "--pieces",
            type=click.IntRange(1),
            help="In how many pieces a change of layout of activations runs beside the matrix products that read or "
            "make its value, wherever that divides them. 1: every one runs whole. By default the search chooses.",
        ),
        encodings=click.option(
            "--encodings",
            type=parse_encodings,
            metavar="NAMES",
            help="What gathers of weights and sums of gradients may send in place of values, where a step is faster: "
            "int8, fp8, int4, or 'auto' for all. 'weights=int8,gradients=int4': in any case; 'gradients=exact|int4': "
            "the faster one. By default nothing: values are sent as they are.",
        ),
        pins=click.option(
            "--pin",
            "pins",
            multiple=True,
            metavar="PIN",
            help="What the search keeps to: a layout of parameters by name or pattern ('lm_head.weight=tp:S(0)', "
            "'*.mlp=sharded', whole, gathered), a degree ('no context', 'tensor<=8', 'zero>=4') or 'memory<=40GB'. "
            "May be repeated.",
        ),
        stages=click.option(
            "--stages",
            type=parse_stages,
            metavar="NUMBER",
            help="Pipeline stages, --mesh being that of one of them, or 'auto': as many as are best. 1: none. "
            "'4,2': a stage of 4 devices and one of 2, --mesh being that of the largest. "
            "By default they are tried where they may pay.",
        ),
        schedule=click.option(
            "--schedule", type=click.Choice(SCHEDULES), help="The order of microbatches in stages; by default the best."
        ),
        per_microbatch=per_microbatch_option,
        precision=precision_option,
        reduce_dtype=reduce_dtype_option,
        optimizer=optimizer_option(),
        time_limit_s=click.option(
            "--time-limit",
            "time_limit_s",
            type=float,
            metavar="SECONDS",
            help="End the search after so long, with the best plan so far and its bound; so does Ctrl-C.",
        ),
        strict=click.option(
            "--strict",
            is_flag=True,
            help="An operator that cannot be split for want of a row is an error, and so is a part that cannot be "
            "captured.",
        ),
        foreign=click.option(
            "--foreign",
            multiple=True,
            metavar="NAME",
            help="A module, or an autograd.Function or function of torch by its full name, that runs as it is, in "
            "Python, whole on every device; NAME=batch: along the batch, if it is row by row. Parts that cannot be "
            "captured are found without being named. May be repeated.",
        ),
        pad=click.option(
            "--pad",
            type=parse_pad,
            metavar="NUMBER",
            help="Pad parameters where that lets so many devices split a dimension that they do not divide, such as a "
            "vocabulary of 50257; 'auto': as many as an axis has. The best plan with and without is kept.",
        ),
        rules=click.option(
            "--rules",
            type=PATH,
            metavar="FILE",
            help="A rule file in place of the shipped catalogue: the only source of the forms of rules that it holds.",
        ),
    )


def model_options_as(metavar: str) -> Callable[[Command], Command]:
    """Return a decorator that adds MODEL, or a transformers config and a batch's shape, as one mapping `model`.

    The mapping has the fields of `models.Request`. `metavar`: the name of MODEL in the command's help.
    """
    return lambda command: together(
        command,
        "model",
        model=click.argument("model", required=False, metavar=metavar),
        hf_config=click.option("--hf-config", type=FILE_PATH, help="A transformers config.json."),
        batch_size=click.option(
            "--batch-size", type=click.IntRange(1), default=8, show_default=True, help="With --hf-config."
        ),
        seq_len=click.option(
            "--seq-len", type=click.IntRange(1), default=128, show_default=True, help="With --hf-config."
        ),
        dtype=click.option(
            "--dtype",
            type=parse_dtype,
            metavar="DTYPE",
            default="float32",
            show_default=True,
            help=f"Of the weights, with --hf-config: {', '.join(DTYPES)}.",
        ),
        seed=click.option("--seed", type=int, default=0, show_default=True, help="Seed before the model is made."),
    )


model_options = model_options_as("[FILE.py:FUNCTION]")


def together(command: Command, name: str, **options: Callable[[Command], Command]) -> Command:
    """Pass the values of some options to the command as one mapping, by the names of their parameters."""

    @wraps(command)
    def gathering(**values: Any) -> object:
        group = {key: values.pop(key) for key in options}
        return command(**{name: group}, **values)

    return reduce(lambda inner, option: option(inner), reversed(options.values()), cast("Command", gathering))
