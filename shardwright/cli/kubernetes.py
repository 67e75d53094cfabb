"""A manifest for Kubernetes: an Indexed Job (batch/v1) with one pod for each machine, and a headless Service.

The Service gives pods names, so that all meet at pod 0. A pod that ends with status 75, or that the cluster takes away,
is made anew and does not count as a failure. No operator has to be installed; Kubernetes 1.31 or newer has all of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwright.cli.launchfiles import Launched, program_words, torchrun_words
from shardwright.stopping import AGAIN

PORT = 29400
SHARED_MEMORY = {"name": "shm", "emptyDir": {"medium": "Memory"}}
"""What NCCL and loaders of data use between processes; a container has 64 MB by itself."""


def manifest(job: Launched, image: str, volumes: Mapping[str, str]) -> str:
    """Return the Service and the Job as YAML. `volumes`: claims of persistent volumes, and where they are mounted."""
    comment = f"# {job.about}\n"
    return comment + "---\n".join("\n".join(_yaml(each)) + "\n" for each in (_service(job), _job(job, image, volumes)))


def _service(job: Launched) -> dict[str, Any]:
    ports = [{"name": "rendezvous", "port": PORT}]
    selector = {"job-name": job.name}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": ports},
    }


def _job(job: Launched, image: str, volumes: Mapping[str, str]) -> dict[str, Any]:
    most = job.nodes[-1]
    nodes = str(most) if len(job.nodes) == 1 else f"{job.nodes[0]}:{most}"
    ignored = [
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [AGAIN]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    spec = {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_s,
        "containers": [_container(job, nodes, image, volumes)],
        "volumes": [SHARED_MEMORY, *({"name": c, "persistentVolumeClaim": {"claimName": c}} for c in volumes)],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name},
        "spec": {
            "completionMode": "Indexed",
            "completions": most,
            "parallelism": most,
            "backoffLimit": job.max_restarts * most,
            "podFailurePolicy": {"rules": ignored},
            "successPolicy": {"rules": [{"succeededIndexes": "0"}]},  # when a run has ended, none waits for another
            "template": {"spec": spec},
        },
    }


def _container(job: Launched, nodes: str, image: str, volumes: Mapping[str, str]) -> dict[str, Any]:
    words = [*torchrun_words(job, nodes, f"{job.name}-0.{job.name}:{PORT}", job.name), *program_words(job)]
    resource = "nvidia.com/gpu" if job.on_gpus else "cpu"
    mounts = [("shm", "/dev/shm"), *volumes.items()]
    where = {"workingDir": next(iter(volumes.values()))} if volumes else {}
    return {
        "name": "train",
        "image": image,
        **where,
        "command": ["shardwright", "run", *words],
        "resources": {"limits": {resource: str(job.per_node)}},
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts],
    }


def _yaml(value: Mapping[str, Any] | Sequence[Any], indent: str = "") -> Iterator[str]:
    """Yield the lines of plain data as YAML; texts stand in quotes, as in JSON."""
    named = isinstance(value, Mapping)
    for head, inner in [(f"{name}:", v) for name, v in value.items()] if named else [("-", v) for v in value]:
        if not isinstance(inner, (Mapping, list)):
            yield f"{indent}{head} {json.dumps(inner)}"
        elif head == "-":
            first, *rest = _yaml(inner, f"{indent}  ")
            yield f"{indent}- {first.lstrip()}"
            yield from rest
        else:
            yield f"{indent}{head}"
            yield from _yaml(inner, f"{indent}  ")
