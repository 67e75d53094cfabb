"""Checks of a plan file that `plan.schema.json` cannot express: attributes, sizes, times, and nothing named twice.

A captured graph has the attributes that the importer wrote, so inference need not doubt them; a file is from anyone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from math import isclose
from typing import Any

from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.attrs import Attr
from shardwright.pcg.errors import PlanError
from shardwright.pcg.foreign import is_foreign, problem_of
from shardwright.pcg.graph import OPAQUE, Graph, Node
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.node import FOREIGN
from shardwright.pcg.rows.declared import ROW_BY_ROW
from shardwright.pcg.rows.experts import ACTIVATIONS
from shardwright.pcg.rows.recurrent import STATES
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.meshes import first_ranks, in_words, num_devices, stage_meshes
from shardwright.pcg.step.pipelining import Schedule
from shardwright.pcg.types import ITEM_BYTES, is_float

MOST_BYTES = 2**80
"""More than any value of a model has."""


def admit(graph: Graph, cluster: Cluster, file: Mapping[str, Any]) -> None:
    """Raise a `PlanError` unless a validated graph, the cluster and the rest of a plan file go together."""
    _check_meshes(graph.mesh, cluster.num_devices, file)
    _check_split(file)
    _check_times(file)
    for node in graph.nodes:
        if wrong := wrong_attribute(node) or _wrong_type(node, graph):
            raise PlanError(f"{node}: {wrong}")
    _check_outputs(graph)


def _check_meshes(mesh: Mesh, devices: int, file: Mapping[str, Any]) -> None:
    """Raise a `PlanError` unless the mesh is the graph's and has all devices; alternatives may have idle ones too."""
    given = Mesh(tuple(file["mesh"]["names"]), tuple(file["mesh"]["sizes"]))
    if given != mesh:
        raise PlanError(f"mesh: expected {mesh}, as the graph has it, got {given}")
    meshes = stage_meshes(mesh, _sized(file))
    if (count := first_ranks(meshes)[-1]) != devices:
        where = f"{in_words(meshes)} have" if len(meshes) > 1 else f"mesh {mesh} has"
        raise PlanError(f"{where} {count} devices, its cluster {devices}")
    known = {devices, devices + (file.get("idle") or {"num_devices": 0})["num_devices"]}
    for number, alternative in enumerate(file["alternatives"]):
        other = Mesh.of(**alternative["mesh"])
        if (count := num_devices(other, _sized(alternative))) not in known:
            place = f"alternatives[{number}].mesh"
            raise PlanError(f"{place}: {other} has {count} devices, the cluster {devices}")


def _stages(file: Mapping[str, Any]) -> int:
    return file.get("execution", {}).get("num_stages", 1)


def _sized(file: Mapping[str, Any]) -> Execution:
    """Return the sizes of stages that the file names, as an `Execution`."""
    sizes = file.get("execution", {}).get("stage_sizes", ())
    return Execution(schedule=Schedule(num_stages=_stages(file), stage_sizes=tuple(sizes)))


def _check_split(file: Mapping[str, Any]) -> None:
    """Raise a `PlanError` for stages without a split: they can be costed, but they are no plan."""
    if _stages(file) > 1 and not file["execution"].get("split"):
        raise PlanError("execution.split: expected how many sections each virtual stage has, got nothing")
    if file.get("execution", {}).get("recompute_by_stage"):
        raise PlanError("execution.recompute_by_stage: expected nothing; a plan says in recompute what each block does")


_PARTS = ("compute_s", "communication_s", "optimizer_s")
_LEFT_OUT = 0.05
"""The share by which listed compute may exceed the timeline's: 0.8 % was seen, perhaps by casts of weights."""


def _check_times(file: Mapping[str, Any]) -> None:
    places = [("", file), *((f"alternatives[{n}].", other) for n, other in enumerate(file["alternatives"]))]
    for place, holder in places:
        prediction = holder["prediction"]
        parts = sum(prediction[part] for part in _PARTS)
        if not isclose(prediction.get("serial_s", parts), parts, rel_tol=1e-9):
            raise PlanError(
                f"{place}prediction.serial_s: expected {parts!r}, its parts together, got {prediction['serial_s']!r}"
            )
        least_s = (
            prediction["compute_s"] * (1 - _LEFT_OUT)
            + prediction["optimizer_s"]
            + prediction["exposed_s"]
            + prediction["bubble_s"]
        )
        if prediction["step_s"] < least_s * (1 - 1e-6):
            raise PlanError(
                f"{place}prediction.step_s: expected at least {least_s!r}, about its parts one after the other, got "
                f"{prediction['step_s']!r}"
            )
    check_bound(file["report"], file["prediction"]["step_s"])


def check_bound(report: Mapping[str, Any], step_s: float) -> None:
    """Raise a `PlanError` if the report of a search says that no plan is as fast as its own, which takes `step_s`."""
    bound_s = report["bound_s"]
    if not report["rewrites"] and bound_s > step_s * (1 + 1e-9):
        raise PlanError(f"report.bound_s: expected at most {step_s!r}, which the plan itself takes, got {bound_s!r}")


def _check_outputs(graph: Graph) -> None:
    """Raise a `PlanError` unless one output is the loss and no output or parameter occurs twice."""
    keys = [key for key, _ in graph.outputs]
    if keys.count("loss") != 1 or len(set(keys)) < len(keys):
        raise PlanError(f"outputs: expected the loss and buffers, each once, got {keys}")
    kind = graph.types[dict(graph.outputs)["loss"]]
    if kind.shape or not is_float(kind.dtype):
        raise PlanError(f"outputs: the loss is {kind}, expected one number of floats")
    [(target, count), *_] = [
        *Counter(node.attr("target") for node in graph.leaves("parameter")).most_common(1),
        ("", 1),
    ]
    if count > 1:
        raise PlanError(f"parameter {target!r} is there {count} times; expected it once")


# ---- nodes ----


def _integer(value: Attr) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**64


def _integers(value: Attr) -> bool:
    return isinstance(value, tuple) and all(map(_integer, value))


def _number(value: Attr) -> bool:
    return isinstance(value, float) or _integer(value)


def _share(value: Attr) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


_KINDS: tuple[tuple[str, Callable[[Attr], bool], str], ...] = (
    (
        "an integer",
        _integer,
        "bins dim groups ignore_index k last layers norm normalized_dims offset places result seed start step stop",
    ),
    ("a tuple of integers", _integers, "dilation dims hides kernel pads padding shape shows size stride"),
    ("a number", _number, "eps high low"),
    ("a number from 0 to 1", _share, "label_smoothing p"),
    ("a number or None", lambda x: x is None or _number(x), "scale"),
    ("an integer or None", lambda x: x is None or _integer(x), "padding_idx"),
    ("a number, True or False", lambda x: isinstance(x, bool) or _number(x), "value"),
    (
        "True or False",
        lambda x: isinstance(x, bool),
        "align antialias batch_first biases bidirectional causal descending finite forward grad keepdim",
    ),
    ("'none' or 'tanh'", lambda x: x in ("none", "tanh"), "approximate"),
    (f"one of {', '.join(ACTIVATIONS)}", lambda x: x in ACTIVATIONS, "activation"),
    ("None or numbers", lambda x: x is None or (isinstance(x, tuple) and all(map(_number, x))), "scales"),
    ("'linear' or 'cubic'", lambda x: x in ("linear", "cubic"), "interpolation"),
    (f"one of {', '.join(STATES)}", lambda x: x in STATES, "cell"),
    ("'mean' or 'sum'", lambda x: x in ("mean", "sum"), "mode"),
    ("a dtype", lambda x: x in ITEM_BYTES, "dtype"),
    ("the name of a tensor", lambda x: isinstance(x, str) and all(x.split(".")), "target"),
)
ATTRIBUTE_KINDS = {name: (expected, check) for expected, check, names in _KINDS for name in names.split()}
"""The kind of value that each attribute has, in every operator. An unlisted attribute may be any plain value."""
_MADE = {"*", "*1", "draw", "offset", "shard"}
"""The fields of a torch expression that the emitter fills in."""


def wrong_attribute(node: Node) -> str:
    """Return what is wrong with an operator's attributes, or ""."""
    attrs = dict(node.attrs)
    if len(attrs) < len(node.attrs):
        return "an attribute is given twice"
    needed = set(re.findall(r"\{([a-z]\w*)", node.row.torch)) - _MADE if node.row else set[str]()
    needed |= {"seed"} if node.is_random else {"target", "grad"} if node.is_leaf else set()
    needed |= {"target", "args", "kwargs", "result"} if node.op == OPAQUE else set()
    needed |= {"call"} if attrs.get("target") == FOREIGN and not node.is_leaf else set()
    needed |= {"call", "result", "shape", "dtype", "batched"} if node.op == ROW_BY_ROW else set()
    if missing := sorted(needed - attrs.keys()):
        return f"attribute {missing[0]!r} is missing; there are {sorted(attrs)}"
    for name, value in node.attrs:
        expected, check = ATTRIBUTE_KINDS.get(name, ("", lambda _: True))
        if not check(value):
            return f"attribute {name!r}: expected {expected}, got {value!r}"
    return problem_of(node) if is_foreign(node) else ""


def _wrong_type(node: Node, graph: Graph) -> str:
    kind = graph.types[node.name]
    if kind.dtype not in ITEM_BYTES:
        return f"dtype {kind.dtype!r} is not one of {sorted(ITEM_BYTES)}"
    if any(size < 0 for size in kind.shape) or kind.num_elements * ITEM_BYTES[kind.dtype] > MOST_BYTES:
        return f"no tensor has the shape {list(kind.shape)}"
    return ""
