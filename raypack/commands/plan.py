"""`raypack plan`: plan one step of given lengths. `raypack evaluate`: cost a plan, own or foreign."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import click
from rich.console import Console
from rich.table import Table as RichTable

from raypack.commands.common import (
    STANDARD_OUTPUT,
    OutputFile,
    check_number,
    handle_errors,
    json_option,
    people_console,
    picture_option,
    write_json,
)
from raypack.commands.strategies import compare_strategies, strategy_table
from raypack.config import ClusterConfig, ModelConfig, load_cluster, load_model, preset_names
from raypack.data.lengths import read_lengths
from raypack.errors import RaypackError
from raypack.exchange.hsap.schedule_text import schedule_text
from raypack.files import read_text, write_file
from raypack.plan.names import POLICIES, SYNCS
from raypack.plan.plan import Plan
from raypack.plan.plan_file import plan_from_json
from raypack.plan.samples import Samples
from raypack.plan.topology import Topology
from raypack.planning.evaluate import Evaluation
from raypack.planning.evaluate import evaluate as evaluate_plan
from raypack.planning.policies import CHOICES, DEFAULT_BUDGET, make_plan
from raypack.registry import FOREIGN

# Ten million evaluations take hours, and nothing is gained beyond.
BUDGET_MAX, BUDGET_SECONDS_MAX = 10_000_000, 86_400
POLICY_HELP = f"How parents and children are chosen: {', '.join(POLICIES)}, or {FOREIGN}."
SYNC_HELP = "Where ranks wait for each other; default: the cluster's."

cluster_option = click.option(
    "--cluster",
    default="h100-8x8",
    show_default=True,
    help=f"Cluster preset ({', '.join(preset_names('clusters'))}) or .toml file.",
)
model_option = click.option(
    "--model",
    default="1f3s-30b-a3b",
    show_default=True,
    help=f"Model preset ({', '.join(preset_names('models'))}) or .toml file.",
)
plan_picture_option = picture_option("Draw the plan to this {kinds}: ranks down, time across.")
schedule_option = click.option("--schedule", is_flag=True, help="Print what hsap sends across nodes, tick by tick.")
sync_option = click.option("--sync", type=click.Choice(SYNCS), default=None, help=SYNC_HELP)


@click.command(context_settings={"show_default": True})
@click.option("--lengths", required=True, help="Length file of one step: .txt, .npy, .npz or .parquet, in tokens.")
@cluster_option
@model_option
@click.option("--policy", default="joint", help=POLICY_HELP)
@click.option("--ranks", type=int, default=None, help="Ranks to plan for, at most the cluster's; default: all.")
@click.option("--cap", type=int, default=None, help="Tokens of one rank in one round; default: the cluster's.")
@sync_option
@click.option("--budget", type=int, default=DEFAULT_BUDGET, help="Evaluations of local search; 0 = plain greedy.")
@click.option("--budget-seconds", type=float, default=None, help="Search this long instead; not reproducible.")
@click.option("--strategies", is_flag=True, help="Also show the pool of strategies for these lengths.")
@click.option("--attention", type=click.Choice(CHOICES), default="ulysses", help="Full attention; auto = the cheapest.")
@click.option("--out", type=OutputFile(), default=None, help="Write the plan as JSON to this file.")
@schedule_option
@plan_picture_option
@json_option
@handle_errors
def plan(
    lengths: str,
    cluster: str,
    model: str,
    policy: str,
    ranks: int | None,
    cap: int | None,
    sync: str | None,
    budget: int,
    budget_seconds: float | None,
    strategies: bool,
    attention: str,
    out: str | None,
    schedule: bool,
    picture: str | None,
    json_target: str | None,
) -> None:
    """Plan one step: which ranks hold and compute each sample, and how far that is from the bound."""
    check_number("budget", budget, 0, BUDGET_MAX)
    overrides: dict[str, Any] = {}
    if cap is not None:
        overrides["rank_tokens_max"] = cap
    if sync is not None:
        overrides["sync"] = sync
    machine, network = load_cluster(cluster, overrides), load_model(model)
    samples = Samples.of_lengths(read_lengths(lengths))
    topology = topology_of(machine, ranks)
    if picture:
        check_picture(topology)
    started = time.perf_counter()
    with Console(stderr=True).status(f"planning {len(samples.ids):,} samples"):
        if budget_seconds is None:
            made = make_plan(samples, topology, machine, network, policy, budget=budget, attention=attention)
        else:
            made = plan_within(budget_seconds, samples, topology, machine, network, policy, attention)
    extra: dict[str, Any] = {"plan_seconds": time.perf_counter() - started}
    if strategies:
        extra["strategies"] = compare_strategies(samples, topology, machine, network)
    figures = evaluate_plan(made, machine, network)
    show(made, figures, machine, json_target, extra, schedule)
    if out:
        write_file(out, made.to_json() + "\n")
    if picture:
        draw(made, machine, network, picture)


@click.command(context_settings={"show_default": True})
@click.argument("plan_file", metavar="PLAN.json")
@cluster_option
@model_option
@sync_option
@schedule_option
@plan_picture_option
@json_option
@handle_errors
def evaluate(
    plan_file: str,
    cluster: str,
    model: str,
    sync: str | None,
    schedule: bool,
    picture: str | None,
    json_target: str | None,
) -> None:
    """Cost the plan in PLAN.json; ranks and nodes come from the plan, rates and cap from the cluster."""
    machine, network = load_cluster(cluster), load_model(model)
    given = plan_from_json(read_text(plan_file))
    if picture:
        check_picture(given.topology)
    figures = evaluate_plan(given, machine, network, sync)
    show(given, figures, machine, json_target, {"plan_seconds": None}, schedule)
    if picture:
        draw(given, machine, network, picture, sync)


def topology_of(cluster: ClusterConfig, ranks: int | None) -> Topology:
    """`ranks` of the cluster, node by node.

    Raises:
        RaypackError: ranks that the cluster lacks.
    """
    there = cluster.nodes * cluster.ranks_per_node
    wanted = there if ranks is None else ranks
    if not 1 <= wanted <= there:
        raise RaypackError(
            f"ranks = {wanted}: cluster {cluster.name} has {there} ({cluster.nodes} nodes of "
            f"{cluster.ranks_per_node}); ask for 1..{there} or give another cluster"
        )
    return Topology.regular(wanted, cluster.ranks_per_node)


def check_picture(topology: Topology) -> None:
    """Raises RaypackError, before there is a plan, where a picture could not show it."""
    # matplotlib takes most of a second to import; only pictures need it.
    from raypack.report.pictures import check_ranks

    check_ranks(topology.world)


def draw(made: Plan, cluster: ClusterConfig, model: ModelConfig, picture: str, sync: str | None = None) -> None:
    from raypack.report.pictures import draw_plans

    draw_plans([made], cluster, model, picture, sync)


def plan_within(
    seconds: float,
    samples: Samples,
    topology: Topology,
    cluster: ClusterConfig,
    model: ModelConfig,
    policy: str,
    attention: str,
) -> Plan:
    """The best of plans with a growing budget, as long as the next is likely to be done in time. Not reproducible.

    Raises:
        RaypackError: no time at all, and as `make_plan`.
    """
    if not 0 < seconds <= BUDGET_SECONDS_MAX:
        raise RaypackError(f"budget-seconds = {seconds}: must be above 0 and at most {BUDGET_SECONDS_MAX:,}")
    started, budget, tried = time.perf_counter(), 0, list[tuple[float, Plan]]()
    while True:
        made = make_plan(samples, topology, cluster, model, policy, budget=budget, attention=attention)
        tried.append((evaluate_plan(made, cluster, model).seconds, made))
        # Twice the budget takes at most about twice as long as all before it.
        if 3 * (time.perf_counter() - started) > seconds:
            best = min(tried, key=lambda each: each[0])[1]
            return replace(best, policy=f"{policy} (timed, not reproducible)")
        budget = 2 * budget or DEFAULT_BUDGET


def show(
    made: Plan,
    figures: Evaluation,
    cluster: ClusterConfig,
    json_target: str | None,
    extra: dict[str, Any],
    schedule: bool = False,
) -> None:
    """The table for people, and the same figures as JSON; with `schedule`, also what hsap sends."""
    console = people_console(json_target)
    if json_target != STANDARD_OUTPUT:
        console.print(figure_table(made, figures, cluster, extra.get("plan_seconds")))
        if "strategies" in extra:
            console.print(strategy_table(extra["strategies"]))
    if schedule:
        console.print(schedule_text(made), highlight=False, markup=False, soft_wrap=True)
    if json_target:
        write_json({**figures.to_data(), **extra, "cluster": cluster.name, "widths": width_counts(made)}, json_target)


def width_counts(made: Plan) -> dict[str, dict[str, int]]:
    """How many samples have each parent and child width."""
    counts: dict[str, dict[str, int]] = {"parent": {}, "child": {}}
    for p in sorted(made.placements, key=lambda p: (p.parent.width, p.child.width)):
        for name, block in (("parent", p.parent), ("child", p.child)):
            key = str(block.width)
            counts[name][key] = counts[name].get(key, 0) + 1
    return {name: dict(sorted(part.items(), key=lambda item: int(item[0]))) for name, part in counts.items()}


def figure_table(made: Plan, figures: Evaluation, cluster: ClusterConfig, plan_seconds: float | None) -> RichTable:
    table = RichTable(title=f"{figures.policy} on {cluster.name}, {figures.ranks} ranks, sync = {figures.sync}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    waiting = float(figures.rank_waiting.mean()) / figures.seconds
    rows = [
        ("samples, tokens", f"{sum(len(r.placements) for r in made.rounds):,}, {made.tokens:,}"),
        ("rounds", f"{figures.rounds}"),
        ("seconds of the step", f"{figures.seconds:.4f}"),
        ("area bound, plain bound (seconds)", f"{figures.bound_seconds:.4f}, {figures.plain_bound_seconds:.4f}"),
        ("seconds / area bound", f"{figures.bound_ratio:.4f}"),
        ("MFU", f"{100 * figures.mfu:.2f} %"),
        ("mean waiting of a rank", f"{100 * waiting:.2f} %"),
        ("most tokens of a rank and round", f"{figures.rank_tokens_max:,} of {cluster.rank_tokens_max:,}"),
    ]
    for site, scopes in figures.bytes.items():
        rows.append((f"{site}: intra, inter (GB)", f"{scopes['intra'] / 1e9:.3f}, {scopes['inter'] / 1e9:.3f}"))
    for name, counts in width_counts(made).items():
        rows.append((f"samples by {name} width", ", ".join(f"{w}: {n:,}" for w, n in counts.items())))
    if plan_seconds is not None:
        rows.append(("plan seconds", f"{plan_seconds:.3f}"))
    for row in rows:
        table.add_row(*row)
    return table
