"""`shardwright cluster import`: a cluster file from other tools' descriptions of the machines."""

from __future__ import annotations

from pathlib import Path

import click

from shardwright.cli.options import FILE_PATH, Number, examples, output_option
from shardwright.pcg.errors import ClusterError


@click.group()
def cluster() -> None:
    """Describe clusters in files."""


@cluster.command(
    "import",
    epilog=examples(
        "cluster import topo.txt --gpu A100-80 -o node.json",
        "cluster import nccl.xml --gpu H100-SXM --hosts 'node[01-16]' -o cluster.json",
    ),
)
@click.argument("file", type=FILE_PATH)
@click.option("--gpu", required=True, metavar="GPU", help="What the GPUs are: a name of the table in docs/clusters.md.")
@click.option(
    "--hosts", metavar="LIST", help="How many nodes: a Slurm host list, such as $SLURM_JOB_NODELIST, or a file."
)
@click.option("--nodes", type=click.IntRange(1), help="How many nodes, as a number; 1 by default.")
@click.option("--network-gb-per-s", type=Number(0, min_open=True),
              help="Of a node, one way. By default as in NCCL's file, else 12.5 (100 Gb/s), assumed.")  # fmt: skip
@output_option("Save the cluster in this file.")
def import_(
    file: Path, gpu: str, hosts: str | None, nodes: int | None, network_gb_per_s: float | None, output: Path | None
) -> None:
    """Read FILE, what `nvidia-smi topo -m` prints on a node or NCCL's topology file, as a cluster of such nodes.

    NCCL_TOPO_DUMP_FILE=FILE makes NCCL write its topology. Links that fit no level are left out, and the result says
    so.
    """
    from shardwright.cost.clusters.imported import imported_cluster, num_hosts

    if hosts is not None and nodes is not None:
        raise click.UsageError("--hosts and --nodes both say how many nodes there are; give one.")
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ClusterError(f"{file}: cannot read it ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise ClusterError(
            f"{file}: expected text in UTF-8, got other bytes; is it the output of another tool?"
        ) from None
    many = num_hosts(hosts) if hosts is not None else nodes or 1
    imported = imported_cluster(text, str(file), gpu, many, network_gb_per_s)
    if output is not None:
        imported.save(output)
    click.echo(imported.summary())
