"""`raypack cluster`: can a cluster hold a run?"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import click
from rich.table import Table

from raypack.clusters.check import ClusterShape, Fault, Report, check_cluster
from raypack.clusters.files import read_cluster_file
from raypack.commands.common import STANDARD_OUTPUT, handle_errors, json_option, people_console, write_json
from raypack.config import Config
from raypack.config.runfile import load_run
from raypack.errors import RaypackError

DEFAULT_FILE = "cluster.yaml"


@click.group()
def cluster() -> None:
    """Compare runs with clusters, before either costs anything."""


@cluster.command(context_settings={"ignore_unknown_options": True})
@click.argument("run", metavar="RUN.toml|PRESET")
@click.argument("overrides", metavar="[--section.key VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--cluster-file",
    metavar="FILE",
    help=f"Ray cluster launcher file, or KubeRay RayCluster or RayJob manifest.  [default: {DEFAULT_FILE}]",
)
@click.option(
    "--address", metavar="ADDRESS", help="A running cluster instead: HOST:PORT of its head, or auto on a node."
)
@json_option
@handle_errors
def check(
    *,
    run: str,
    overrides: tuple[str, ...],
    cluster_file: str | None,
    address: str | None,
    json_target: str | None,
) -> None:
    """Does the cluster hold the run of this file or preset? Exit code 0 = yes, 2 = no, with one line for each fault.

    Looks for workers that no node type can hold and too few nodes at the cluster's largest; with --address also for
    places of the run that a node does not see. A file is only read: no cloud is asked whether it has such machines.
    """
    if cluster_file and address:
        raise RaypackError("--cluster-file and --address: give one of them")
    config = load_run([run, *overrides])
    report, shape = _report(config, cluster_file or DEFAULT_FILE, address)
    if json_target != STANDARD_OUTPUT:
        people_console().print(_table(shape))
        click.echo(f"{report.source}: at most {report.fitting} of {report.workers} workers fit")
        for note in report.notes:
            click.echo(f"note: {note}")
    for fault in report.faults:
        click.echo(f"error: {fault.text}", err=True)
    if json_target is not None:
        write_json({"run": run, **_data(report, shape)}, json_target)
    if not report.ok:
        sys.exit(2)


def _report(config: Config, cluster_file: str, address: str | None) -> tuple[Report, ClusterShape]:
    if address is None:
        shape = read_cluster_file(cluster_file)
        return check_cluster(config, shape), shape
    from raypack.driver.nodes import read_live_cluster  # Ray and torch: seconds, and not for a file

    found: list[Fault]
    shape, found = read_live_cluster(config, address)
    report = check_cluster(config, shape)
    return replace(report, faults=(*report.faults, *found)), shape


def _data(report: Report, shape: ClusterShape) -> dict[str, Any]:
    return {
        "cluster": report.source,
        "ok": report.ok,
        "workers": report.workers,
        "workers_min": report.workers_min,
        "workers_fitting": report.fitting,
        "workers_ready": report.ready,
        "nodes_max": shape.nodes_max,
        "node_types": [
            {"name": kind.name, "cpus": kind.cpus, "gpus": kind.gpus, "nodes_min": kind.least, "nodes_max": kind.most}
            for kind in shape.types
        ],
        "faults": [fault._asdict() for fault in report.faults],
        "notes": list(report.notes),
    }


def _table(shape: ClusterShape) -> Table:
    table = Table()
    for heading in ("node type", "CPU", "GPU", "nodes"):
        table.add_column(heading, justify="left" if heading == "node type" else "right")
    for kind in shape.types:
        table.add_row(kind.name, f"{kind.cpus:g}", f"{kind.gpus:g}", f"{kind.least} to {kind.most}")
    return table
