"""`raypack simulate`: what each policy would give on a described cluster, step by step, without renting it."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as RichTable

from raypack.commands.common import (
    STANDARD_OUTPUT,
    check_number,
    handle_errors,
    json_option,
    people_console,
    picture_option,
    write_json,
)
from raypack.commands.plan import BUDGET_MAX, check_picture, cluster_option, model_option, sync_option, topology_of
from raypack.config import load_cluster, load_model
from raypack.errors import RaypackError
from raypack.plan.names import POLICIES
from raypack.planning.policies import DEFAULT_BUDGET
from raypack.registry import FOREIGN
from raypack.simulate.presets import PRESETS
from raypack.simulate.replay import Replay, check_policies, replay
from raypack.simulate.summary import PolicySummary, summarise, to_data
from raypack.simulate.trace import read_trace

STEPS_MAX = 100_000
EPILOG = "\b\nLength presets:\n" + "\n".join(f"  {p.name:<14} {p.kind}: {p.about}" for p in PRESETS.values())

POLICIES_HELP = f"Policies to compare, separated by commas; {FOREIGN} for one of your own."


@click.command(context_settings={"show_default": True, "max_content_width": 120}, epilog=EPILOG)
@click.option(
    "--lengths", required=True, help="Length preset (below), or file: .txt, .npy, .npz or .parquet, in tokens."
)
@cluster_option
@model_option
@click.option("--policies", default=",".join(POLICIES), help=POLICIES_HELP)
@click.option("--steps", type=int, default=20, help="Steps to draw.")
@click.option(
    "--tokens-per-step", type=int, default=1_048_576, help="A step takes samples until the next exceeds this."
)
@click.option("--ranks", type=int, default=None, help="Ranks to plan for, at most the cluster's; default: all.")
@click.option("--cap", type=int, default=None, help="Tokens of one rank in one round; default: the cluster's.")
@sync_option
@click.option(
    "--budget", type=int, default=DEFAULT_BUDGET, help="Evaluations of local search a step; 0 = plain greedy."
)
@click.option("--seed", type=int, default=0, help="Of the preset's lengths and of the order of samples.")
@click.option("--clip", type=int, default=0, help="Longest sample, tokens: longer ones are cut; 0 = none is.")
@json_option
@picture_option("Draw how far each policy is from the best one to this {kinds}.")
@click.option(
    "--picture-step",
    type=int,
    default=None,
    help="Draw every policy's plan of this step (from 0) to --picture, in place of that.",
)
@handle_errors
def simulate(
    lengths: str,
    cluster: str,
    model: str,
    policies: str,
    steps: int,
    tokens_per_step: int,
    ranks: int | None,
    cap: int | None,
    sync: str | None,
    budget: int,
    seed: int,
    clip: int,
    json_target: str | None,
    picture: str | None,
    picture_step: int | None,
) -> None:
    """Plan the steps of a length list under several policies and compare what they would cost.

    Nothing runs on the cluster: seconds, bytes and MFU come from the cost model, plan seconds from this machine.
    """
    check_number("steps", steps, 1, STEPS_MAX)
    check_number("budget", budget, 0, BUDGET_MAX)
    names = [name.strip() for name in policies.split(",") if name.strip()]
    check_policies(names)
    if picture_step is not None:
        check_picture_step(picture, picture_step, steps)
    asked = {"rank_tokens_max": cap, "sync": sync}
    machine = load_cluster(cluster, {key: value for key, value in asked.items() if value is not None})
    network, topology = load_model(model), topology_of(machine, ranks)
    if picture_step is not None:
        check_picture(topology)
    trace = read_trace(lengths, tokens_per_step=tokens_per_step, seed=seed, clip=clip)
    with progress_bar(json_target) as progress:
        task = progress.add_task("plans", total=steps * len(names))
        replayed = replay(
            trace,
            topology,
            machine,
            network,
            names,
            steps,
            budget=budget,
            keep=() if picture_step is None else (picture_step,),
            progress=lambda: progress.advance(task),
        )
    summaries = summarise(replayed)
    if json_target != STANDARD_OUTPUT:
        show(replayed, summaries, people_console(json_target))
    if json_target:
        write_json(to_data(replayed, summaries), json_target)
    if picture:
        draw(replayed, picture, picture_step)


def check_picture_step(picture: str | None, picture_step: int, steps: int) -> None:
    """Raises RaypackError for a step whose plans nobody draws, or that does not come."""
    if not picture:
        raise RaypackError(f"picture-step = {picture_step}: needs --picture FILE to draw to")
    if not 0 <= picture_step < steps:
        raise RaypackError(f"picture-step = {picture_step}: the steps are 0..{steps - 1}; ask for one of them")


def draw(replayed: Replay, picture: str, picture_step: int | None) -> None:
    # matplotlib takes most of a second to import; only pictures need it.
    if picture_step is None:
        from raypack.simulate.policy_chart import draw_policies

        draw_policies(replayed, picture)
    else:
        from raypack.report.pictures import draw_plans

        kept = (planned[picture_step].plan for planned in replayed.planned.values())
        draw_plans([plan for plan in kept if plan is not None], replayed.cluster, replayed.model, picture)


def progress_bar(json_target: str | None) -> Progress:
    """On standard error, so that a table or JSON on standard output stays alone; gone when done."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def show(replayed: Replay, summaries: Sequence[PolicySummary], console: Console) -> None:
    """The table for people, by policy."""
    trace, cluster = replayed.trace, replayed.cluster
    clipped = f", {trace.clipped:,} clipped to {trace.longest:,} tokens" if trace.clipped else ""
    console.print(f"lengths: {trace.name} ({trace.kind}), {trace.documents:,} documents{clipped}", highlight=False)
    console.print(f"cluster: {cluster.name} ({cluster.source or 'source not given'})", highlight=False)
    table = RichTable(
        title=f"{replayed.steps} steps of {trace.stream.tokens_per_step:,} tokens, {replayed.model.name}, "
        f"{replayed.topology.world} ranks, sync = {cluster.sync}",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("", no_wrap=True)
    for each in summaries:
        table.add_column(each.policy, justify="right", no_wrap=True)
    for name, cells in zip(FIGURES, zip(*(figures_of(each) for each in summaries), strict=True), strict=True):
        table.add_row(name, *cells)
    console.print(table)


FIGURES = (
    "mean step seconds",
    "p95 step seconds",
    "x faster than static",
    "seconds / bound",
    "  worst step",
    "MFU",
    "waiting of a rank",
    "intra GB a step",
    "inter GB a step",
    "wide-parent steps",
    "rounds a step",
    "plan seconds",
)


def figures_of(each: PolicySummary) -> list[str]:
    """The cells of one policy, in the order of `FIGURES`."""
    return [
        f"{each.seconds:.4f}",
        f"{each.seconds_p95:.4f}",
        "-" if each.speedup is None else f"{each.speedup:.3f}",
        f"{each.bound_ratio:.4f}",
        f"{each.bound_ratio_max:.4f}",
        f"{100 * each.mfu:.1f} %",
        f"{100 * each.waiting_ratio:.1f} %",
        f"{each.intra_bytes / 1e9:.4g}",
        f"{each.inter_bytes / 1e9:.4g}",
        f"{100 * each.wide_ratio:.0f} %",
        f"{each.rounds:.2f}",
        f"{each.plan_seconds:.3f}",
    ]
