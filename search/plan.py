"""Plans: a parallel graph with where it came from, what it should cost, and what it was compared with.

A plan is saved as versioned JSON. The graph is in its text form, so that every other view (explain, the page, the
lowered program) is derived from the file alone. A file is data, from anyone: `plan.schema.json` says what it may hold,
and what it says twice must agree.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.prediction import Prediction
from shardwright.pcg.arguments import PATH, checked
from shardwright.pcg.errors import PlanError, ShardwrightError, printable
from shardwright.pcg.files import read_whole, write_whole
from shardwright.pcg.foreign import calls
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import Layouts
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.padding.stretches import Padding
from shardwright.pcg.schema import load_schema, problem
from shardwright.pcg.shown import READ
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.lifetimes import Zero, lifetimes
from shardwright.pcg.step.precisions import Precision
from shardwright.pcg.text import parse_graph, print_graph
from shardwright.pcg.units import seconds, size
from shardwright.search.admission import admit, check_bound
from shardwright.search.checked import CaptureCheck
from shardwright.search.request.options import NOTHING, SearchOptions

VERSION = 3
"""The file's version. 2: timeline predictions, with exposed communication and the memory's peak. 3: how it is run."""
READABLE = (2, 3)
EDITED = "the file may have been edited or cut, make the plan again"


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another plan for the same model and cluster, costed by the same model.

    `estimated`: from one block in place of all that equal it (`search.exact.folding`), not from the whole graph.
    `execution`: how it is run. `lifetimes`: of its gathered parameters, the most frequent first. `remedy`: the change
    with which it would fit (`search.tree.remedies.cheapest`), or "".
    """

    name: str
    mesh: Mesh
    prediction: Prediction
    fits: bool
    execution: Execution = DEFAULT
    lifetimes: tuple[Zero, ...] = ()
    estimated: bool = False
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "mesh": dict(zip(self.mesh.names, self.mesh.sizes, strict=True)),
            "fits": self.fits,
            "execution": self.execution.to_json(),
            "lifetimes": list(self.lifetimes),
            "estimated": self.estimated,
            **({"remedy": self.remedy} if self.remedy else {}),
            "prediction": self.prediction.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], cluster: Cluster) -> Alternative:
        """Read what `to_json` gave; old files do not say how it is run."""
        execution = Execution.from_json(data.get("execution", {}))
        prediction, zeros = _prediction(data, cluster), tuple(data.get("lifetimes", ()))
        mesh, estimated = Mesh.of(**data["mesh"]), data.get("estimated", False)
        remedy = data.get("remedy", "")
        return cls(data["name"], mesh, prediction, data["fits"], execution, zeros, estimated, remedy)


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Certified rules applied to a part of the graph: for each step the rule and the number of its match.

    `start` and `end` name the values between which the part lies, separated by spaces
    (`search.rewrites.splits.between`).
    """

    start: str
    end: str
    steps: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change with which a plan fits, and that plan's predicted step; for a smaller batch, the step of that batch."""

    what: str
    step_s: float


@dataclass(frozen=True, slots=True)
class SearchReport:
    """The course of the search that found the plan.

    `bound_s` is a proven lower bound of a step by the timeline (`Prediction.step_s`; `search.exact.least` has the
    proof). It holds for all layouts without rewrites on the `num_meshes` meshes of devices, run in as many microbatches
    and stages and with the same recomputation as the plan, or with none where the plan recomputes single values. It
    holds whatever memory they take and however long gathered weights stay; equal blocks are laid out alike. 0 where
    there is no bound.

    `padding`: the dimensions of parameters that are padded before any rewrite (`pcg.padding`).

    `obstacle`: why the batch cannot be cut into microbatches, or "". `remedies`: the changes with which a plan would
    fit, where none does. `stopped`: what ended the search early, or "". `left`: the number of attempts that might have
    won and were not made then. `rows`: the batch's number of rows, and that after some are added for devices to share
    it evenly (`pcg.padding.rows`); (): none are.
    """

    seconds: float
    num_meshes: int
    bound_s: float
    limit_bytes: int
    rewrites: tuple[Rewrite, ...] = ()
    obstacle: str = ""
    remedies: tuple[Remedy, ...] = ()
    stopped: str = ""
    left: int = 0
    rows: tuple[int, ...] = ()
    padding: tuple[Padding, ...] = ()


@dataclass(frozen=True, slots=True)
class Idle:
    """The devices that a plan leaves unused of the `cluster` that it was asked for: `num_devices`, and the reason."""

    cluster: str
    num_devices: int
    reason: str


@dataclass(frozen=True, repr=False)
class Plan:
    """A plan to train one model on one cluster.

    graph          the parallel graph; its erasure is the captured graph up to `report.padding` and the certified
                   `report.rewrites`
    fingerprint    of the captured serial graph, so that a plan is never run for another model
    alternatives   the baselines, and the best plan of every other mesh
    cluster        the devices that the plan runs on; where it leaves some `idle`, a cluster of the others
    execution      how a step is run: the precision that the model is captured under (`pcg.precision`), what backward
                   recomputes, whose statistics are those of each microbatch, and how blocks are spread over pipeline
                   stages; the mesh is then that of one stage. The mesh's axis of time has the number of microbatches
    asked          what the user asked the search to keep to
    capture_check  how the captured graph was compared with an eager step; None: it was not to be
    """

    graph: Graph
    cluster: Cluster
    model: str
    fingerprint: str
    prediction: Prediction
    alternatives: tuple[Alternative, ...]
    report: SearchReport
    execution: Execution = DEFAULT
    asked: SearchOptions = NOTHING
    idle: Idle | None = None
    capture_check: CaptureCheck | None = None

    def __repr__(self) -> str:
        """Return lines: the model, the cluster and the mesh; the step's time and memory; the foreign parts, if any."""
        p, cluster = self.prediction, self.cluster
        idle = f" and {self.idle.num_devices} idle" if self.idle else ""
        names = dict.fromkeys(call.name for call in calls(self.graph))
        foreign = f",\n     of which {', '.join(names)} is not captured and runs as it is" if names else ""
        return printable(
            f"Plan({self.model} on {cluster.name}, {cluster.num_devices} devices{idle}, mesh {self.mesh}:\n"
            f"     step {seconds(p.step_s)}, {size(p.memory.total_bytes)} of {size(p.device_bytes)} "
            f"on each device{foreign})"
        )

    @property
    def precision(self) -> Precision | Mapping[str, Precision] | None:
        """The precision as it was asked for: of the whole model, or by module."""
        precision = self.execution.precision
        return precision if precision is None or isinstance(precision, str) else dict(precision)

    @property
    def mesh(self) -> Mesh:
        return self.graph.mesh

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "shardwright-plan",
            "version": VERSION,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "cluster": self.cluster.to_json(),
            "idle": self.idle and asdict(self.idle),
            "mesh": {"names": list(self.mesh.names), "sizes": list(self.mesh.sizes)},
            "execution": self.execution.to_json(),
            "asked": self.asked.to_json(),
            "capture_check": self.capture_check and self.capture_check.to_json(),
            "pipeline": None,
            "prediction": self.prediction.to_json(),
            "alternatives": [other.to_json() for other in self.alternatives],
            "report": json.loads(json.dumps(asdict(self.report))),  # tuples become lists, as in a file
            "graph": print_graph(self.graph).splitlines(),
        }

    @classmethod
    def from_json(cls, data: object, source: str = "plan") -> Plan:
        """Read what `to_json` gave. Raises `PlanError` naming the file and field.

        A plan with schedules of collectives is priced again, by those that the file has.
        """
        if not isinstance(data, dict) or data.get("format") != "shardwright-plan":
            raise PlanError(f"{source}: this is not a plan; expected a JSON object with format 'shardwright-plan'")
        if data.get("version") not in READABLE or isinstance(data["version"], bool):
            raise PlanError(
                f"{source}: plan version {data.get('version')!r} is not supported, this Shardwright reads versions "
                f"{' and '.join(map(str, READABLE))}; make the plan again"
            )
        if wrong := problem(data, load_schema("shardwright.search", "plan.schema.json")):
            raise PlanError(f"{source}: {wrong}; {EDITED}")
        file: dict[str, Any] = data
        execution = file.get("execution", {}) if file["version"] > 2 else {"precision": file.get("precision")}
        report: dict[str, Any] = {
            **file["report"],
            "rewrites": tuple(_rewrite(rewrite) for rewrite in file["report"]["rewrites"]),
            "padding": tuple(Padding.from_json(padding) for padding in file["report"].get("padding", ())),
            "remedies": tuple(Remedy(**remedy) for remedy in file["report"].get("remedies", ())),
            "rows": tuple(file["report"].get("rows", ())),
        }
        try:
            graph, cluster = (
                parse_graph("\n".join(file["graph"])).validate(),
                Cluster.from_json(file["cluster"], "cluster"),
            )
            plan = cls(
                graph,
                cluster,
                file["model"],
                file["fingerprint"],
                _prediction(file, cluster),
                tuple(Alternative.from_json(other, cluster) for other in file["alternatives"]),
                SearchReport(**report),
                Execution.from_json(execution),
                SearchOptions.from_json(file.get("asked", {})),
                Idle(**idle) if (idle := file.get("idle")) else None,
                CaptureCheck.from_json(check) if (check := file.get("capture_check")) else None,
            )
            admit(plan.graph, plan.cluster, file)
            if cluster.schedules is not None:  # an edited list of schedules has another price
                from shardwright.cost.predict import predict  # no other plan is priced again

                plan = replace(plan, prediction=predict(graph, cluster, plan.execution))
                check_bound(file["report"], plan.prediction.step_s)
        except ShardwrightError as error:
            raise PlanError(f"{source}: {error}; {EDITED}") from error
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan; an existing file is replaced only once the new one is complete."""
        write_whole(Path(path), self.text(), "the plan", PlanError)

    def text(self) -> str:
        """Return the text of the plan's file."""
        return json.dumps(self.to_json(), indent=1) + "\n"

    @classmethod
    @checked(PlanError, path=PATH)
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file. Raises `PlanError` for a missing, truncated or unsupported file."""
        return cls.from_bytes(read_whole(Path(path), "the plan", PlanError), str(path))

    @classmethod
    def from_bytes(cls, content: bytes, source: str) -> Plan:
        """Read what a file holds. Raises `PlanError` for what is truncated or unsupported, naming the `source`."""
        try:
            data = json.loads(content.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise PlanError(
                f"{source}: not a complete JSON file ({error}); it may have been cut, make the plan again"
            ) from error
        return cls.from_json(data, source)


def _prediction(file: Mapping[str, Any], cluster: Cluster) -> Prediction:
    """Read a prediction. Old files do not name the devices of its memory, as they have no stages on unlike ones."""
    return Prediction.from_json({"device_bytes": cluster.device.memory_bytes, **file["prediction"]})


def _rewrite(data: Mapping[str, Any]) -> Rewrite:
    return Rewrite(data["start"], data["end"], tuple((rule, number) for rule, number in data["steps"]))


def most_frequent(graph: Graph) -> tuple[Zero, ...]:
    """Return the lifetimes of gathered parameters, the most frequent first."""
    return tuple(zero for zero, _ in Counter(lifetimes(graph).values()).most_common())


def fingerprint(graph: Graph) -> str:
    """Return a digest of what a serial graph computes: operators, shapes, attributes, wiring and the order of draws.

    Names of nodes, their order and source lines play no part: they differ between two processes where a model loops
    over a `set`.
    """
    digests = structure(graph)
    results = sorted((key, digests[name]) for key, name in graph.outputs)
    batch = sorted(digests[node.name] for node in graph.leaves("input"))
    return _digest((results, batch, [number for _, number in graph.draws]))[:16]


def structure(graph: Graph) -> Mapping[str, str]:
    """Return each node's digest; nodes of any graphs that compute the same from the same leaves have equal digests."""
    digests: dict[str, str] = {}
    for node in graph.nodes:
        digests[node.name] = _digest((node.op, attributes(node), [digests[i] for i in node.inputs]))
    return digests


def attributes(node: Node) -> str:
    """Return the attributes that decide what a node computes, as text."""
    return repr(sorted((k, v) for k, v in node.attrs if not (node.is_leaf and k in ("layouts", *READ))))


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def stored(graph: Graph) -> dict[str, Layouts]:
    """Return the layouts of a parallel graph's parameters on the axes of devices, by their names in the model."""
    first = int(TIME in graph.mesh.names)
    return {str(leaf.attr("target")): graph.types[leaf.name].layouts[first:] for leaf in graph.leaves("parameter")}
