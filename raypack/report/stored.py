"""What the directory of a run holds, read as it goes on, after it ended, or after it was killed.

The plan of a step is the one that was kept, else it is planned once more from what the run left.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from raypack.config import ClusterConfig, Config, ModelConfig, build, read_toml
from raypack.errors import RaypackError
from raypack.files import read_text
from raypack.observe.attempts import ends_of
from raypack.observe.record import StepRecord, ids_digest
from raypack.observe.run_files import CONFIG_FILE, plan_file
from raypack.observe.steps import read_steps
from raypack.observe.summary import Summary, read_summary, summarise
from raypack.plan.plan import Plan, StreamState
from raypack.plan.plan_file import plan_from_json

ROWS_MAX = 40


@dataclass(frozen=True)
class StoredRun:
    """A run as it is on disk.

    Attributes:
        records: resolved (`steps.resolve`).
        summary: of them; stop reason and notes from `summary.json`, where the run left one.
        config: the text of its `config.toml`, "" where there is none.
    """

    folder: Path
    records: list[StepRecord]
    summary: Summary
    config: str

    @property
    def name(self) -> str:
        return self.summary.run

    @classmethod
    def read(cls, folder: str | Path) -> StoredRun:
        """Raises RaypackError for no run there, or files that are none of a run's."""
        folder = Path(folder)
        records, left = read_steps(folder), read_summary(folder)
        # A directory's name need not be text, but pages and JSON are.
        name = left.run if left else os.fsencode(folder.resolve().name).decode("utf-8", "backslashreplace")
        reason, notes = (left.stop_reason, left.notes) if left else ("", [])
        summary = summarise(records, name, reason, notes, ends_of(folder))
        config = folder / CONFIG_FILE
        return cls(folder, records, summary, read_text(config) if config.is_file() else "")


def run_config(run_dir: Path) -> Config:
    """The run's settings.

    Raises:
        RaypackError: no `config.toml` there, or one of another version.
    """
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise RaypackError(f"{run_dir} has no {CONFIG_FILE}: give the directory of a run, e.g. runs/NAME")
    return build(Config, read_toml(path))


def costing(config: Config) -> tuple[ClusterConfig, ModelConfig]:
    """What the run's planner costs plans with."""
    from raypack.planning.steps import plan_cluster

    return plan_cluster(config), config.model


def plan_of(run_dir: Path, step: int, records: Sequence[StepRecord]) -> tuple[Plan, str]:
    """The plan of `step`, and where it comes from.

    Kept plans (`plan.keep`) are read. Others are made again: a plan is a pure function of the configuration, the
    corpus and the step's place in the stream, all of which the run has left.

    Raises:
        RaypackError: no such step; no kept plan and no corpus any more; other samples than the run had.
    """
    record = next((r for r in records if r.step == step and r.effective and r.sample_count), None)
    if record is None:
        known = [r.step for r in records if r.effective and r.sample_count]
        there = f"{known[0]}..{known[-1]}" if known else "none yet"
        raise RaypackError(f"step = {step}: the run has no such step; recorded are {there}")
    path = plan_file(run_dir, step)
    if path.is_file():
        return plan_from_json(read_text(path)), "as it was kept"
    return _planned_again(run_config(run_dir), record), "planned once more by this raypack"


def _planned_again(config: Config, record: StepRecord) -> Plan:
    # Corpora and the planner need most of the package; only this needs them.
    from raypack.data.corpus import Corpus
    from raypack.plan.topology import Topology
    from raypack.planning.steps import StepPlanner, plan_cluster

    corpus = Corpus.open(config.data.corpus)
    per_node = plan_cluster(config).ranks_per_node
    if config.topology.nodes and sum(config.topology.nodes) == record.world:
        topology = Topology(config.topology.nodes)
    elif record.nodes and record.world % record.nodes == 0:
        topology = Topology.regular(record.world, record.world // record.nodes)
    else:
        topology = Topology.regular(record.world, per_node)
    before = StreamState(config.data.seed, record.epoch, record.first_sample)
    made = StepPlanner(config, corpus).plan(topology, record.step, before).plan
    if ids_digest(p.sample for p in made.placements) != record.sample_ids_digest:
        raise RaypackError(
            f"step {record.step}: {config.data.corpus} has other samples than the run had; keep plans by --plan.keep"
        )
    return made


def plan_table(plan: Plan, where: str) -> Table:
    """Rounds and samples, longest first, at most `ROWS_MAX` of them."""
    rows = [(number, p) for number, each in enumerate(plan.rounds) for p in each.placements]
    rows.sort(key=lambda row: (-row[1].length, row[1].sample))
    title = (
        f"step {plan.step}: {plan.policy}, {len(rows)} samples, {len(plan.rounds)} rounds on nodes {list(plan.nodes)}"
    )
    more = f"; the {len(rows) - ROWS_MAX} shorter ones left out" if len(rows) > ROWS_MAX else ""
    table = Table(title=f"{title} ({where}{more})", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("sample", "tokens", "round", "parent", "child", "attention", "recompute"):
        table.add_column(name, justify="right" if name in ("sample", "tokens", "round") else "left")
    for number, p in rows[:ROWS_MAX]:
        table.add_row(
            str(p.sample), f"{p.length:,}", str(number), _ranks(p.parent), _ranks(p.child), p.attention,
            plan.rounds[number].recompute,
        )  # fmt: skip
    return table


def _ranks(block: tuple[int, int]) -> str:
    first, width = block
    return f"{first}" if width == 1 else f"{first}..{first + width - 1} ({width})"
