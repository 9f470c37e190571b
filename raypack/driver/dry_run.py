"""`--dry-run`: every check before a start, and what the first step would be. Starts no Ray, leaves no run directory."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.table import Table

from raypack.checkpoint.state import RunState
from raypack.checkpoint.storage import is_url
from raypack.config import Config
from raypack.data.corpus import Corpus
from raypack.driver.nodes import check_storage
from raypack.driver.preflight import Prepared, planned_topology, prepare_run
from raypack.driver.ray_cluster import address_of
from raypack.driver.rundir import check_writable
from raypack.plan.plan import Placement, Plan
from raypack.plan.topology import Block
from raypack.planning.evaluate import Evaluation, evaluate
from raypack.planning.steps import PlannedStep, StepPlanner
from raypack.report.console import megabytes

SAMPLES_SHOWN = 20


def dry_run(config: Config, console: Console | None = None) -> None:
    """Check a run as its start would, and print the plan of its longest sample and of its first step.

    Raises:
        RaypackError: as the start would, but for what only Ray's nodes know.
    """
    console = console or Console()
    run = prepare_run(config)
    check_writable(run.run_dir)
    _check_checkpoint_root(config, run.run_dir)
    planner = StepPlanner(config, Corpus.open(run.corpus))
    topology = planned_topology(config, planner.cluster, config.topology.workers)
    longest = planner.check_longest(topology)
    done = RunState.read(run.resume) if run.resume else None
    first = planner.plan(topology, done.step if done else 0, done.stream if done else planner.stream.start)

    def cost(plan: Plan) -> Evaluation:
        return evaluate(plan, planner.cluster, config.model, itemsize=planner.itemsize)

    _say(console, f"dry run of {run.run_dir.name}: nothing is started or written")
    console.print(_checked(run))
    _say(console, "")
    _say(console, _longest_line(longest, cost(longest)))
    _say(console, _step_line(first, topology.nodes))
    console.print(_placements(first.plan))
    console.print(_against_baselines(first, cost(first.plan), planner.cluster.name))
    _say(console, "all checks passed; to start the run, give the same command without --dry-run")


def _check_checkpoint_root(config: Config, run_dir: Path) -> None:
    root = config.train.checkpoint_root
    if is_url(root):
        check_storage(config, run_dir, config.timeouts.actor)
    elif root:  # the probe of `check_storage` would leave the run's folder behind
        check_writable(Path(root) / run_dir.name, "train.checkpoint_root")


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)


def _checked(run: Prepared) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("run directory", str(run.run_dir))
    table.add_row("corpus", str(run.corpus))
    for note in run.notes:
        table.add_row("", note)
    model = run.config.model
    table.add_row("model", f"{model.name}: {model.layers} layers of {model.pattern}, width {model.width}")
    if address := address_of(run.config):
        text = f"the Ray cluster at {address}: `raypack cluster check RUN.toml --address {address}` does"
        table.add_row("not asked", text)
    else:
        table.add_row("this machine", f"{os.uname().nodename} can start {run.config.topology.workers} workers")
    return table


def _longest_line(plan: Plan, figures: Evaluation) -> str:
    placement = next(iter(plan.placements))
    return (
        f"longest sample, {placement.length:,} tokens: parent {_ranks(placement.parent)}, child "
        f"{_ranks(placement.child)}, {placement.attention}; {figures.seconds:.3g} s a step alone, as modelled"
    )


def _step_line(first: PlannedStep, nodes: tuple[int, ...]) -> str:
    plan = first.plan
    samples, rounds = sum(1 for _ in plan.placements), len(plan.rounds)
    return (
        f"step {plan.step}: {samples} samples, {plan.tokens:,} tokens, {rounds} round{'s' * (rounds > 1)}, on nodes of "
        f"{', '.join(map(str, nodes))} ranks; planned in {first.plan_seconds:.2f} s"
    )


def _placements(plan: Plan) -> Table:
    """The longest samples of a step and who computes them."""
    rows = [(number, placement) for number, each in enumerate(plan.rounds) for placement in each.placements]
    rows.sort(key=lambda row: (-row[1].length, row[1].sample))
    table = Table()
    for heading in ("sample", "tokens", "round", "parent", "child", "attention"):
        table.add_column(heading, justify="left" if heading == "attention" else "right")
    for number, placement in rows[:SAMPLES_SHOWN]:
        table.add_row(*_row(number, placement))
    if len(rows) > SAMPLES_SHOWN:
        table.caption = f"and {len(rows) - SAMPLES_SHOWN} shorter ones"
    return table


def _row(number: int, placement: Placement) -> tuple[str, ...]:
    parent, child = _ranks(placement.parent), _ranks(placement.child)
    return str(placement.sample), f"{placement.length:,}", str(number), parent, child, placement.attention


def _ranks(block: Block) -> str:
    return f"{block.first}" if block.width == 1 else f"{block.first}-{block.end - 1}"


def _against_baselines(first: PlannedStep, own: Evaluation, cluster: str) -> Table:
    """Seconds and bytes of the plan and of the baselines for the same samples."""
    table = Table(
        title=f"the same samples, modelled on {cluster} (ranks wait at each {own.sync})", title_justify="left"
    )
    for heading in ("plan", "seconds", "x this", "MB between nodes", "MB inside nodes"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for name, seconds, sent in (
        (f"this ({first.plan.policy})", first.plan_step_seconds, own.bytes),
        ("dynamic", first.dynamic_step_seconds, first.bytes_dynamic),
        ("static", first.static_step_seconds, first.bytes_static),
    ):
        inter, intra = (sum(site[scope] for site in sent.values()) for scope in ("inter", "intra"))
        ratio = seconds / first.plan_step_seconds
        table.add_row(name, f"{seconds:.3g}", f"{ratio:.2f}", megabytes(inter), megabytes(intra))
    return table
