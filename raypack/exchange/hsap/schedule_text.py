"""The hsap schedule of a plan as text for people: who holds which segments, and what crosses nodes at each tick."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raypack.exchange.hsap.schedule import Message, Step
from raypack.exchange.hsap.spread import Spread, build_spread
from raypack.exchange.layout import Layout
from raypack.plan.plan import Plan
from raypack.plan.topology import Block


def schedule_text(plan: Plan) -> str:
    """Every spread block of every round; one line that says so where there is none."""
    lines: list[str] = []
    for number, each in enumerate(plan.rounds):
        layout = Layout(each, plan.topology)
        done: list[Block] = []
        for rank in range(plan.topology.world):
            if any(block.holds(rank) for block in done):
                continue
            spread = build_spread(layout, rank)
            if spread is not None:
                done.append(spread.block)
                lines += _block_lines(number, layout, spread)
    return "\n".join(lines) or "no sample is spread over nodes: there is nothing to schedule"


def _block_lines(number: int, layout: Layout, spread: Spread) -> Iterator[str]:
    nodes, first_node = spread.block.width // spread.width, layout.topology.node_of[spread.block.first]
    samples = layout.columns["sample"][spread.placements]
    found = [build_spread(layout, spread.block.first + node * spread.width) for node in range(nodes)]
    schedules = [each.schedule for each in found if each is not None]
    yield f"round {number}, ranks {spread.block}: {nodes} nodes of {spread.width}, {schedules[0].ticks} ticks"
    yield from _segment_lines(spread, samples, first_node)
    for tick in range(schedules[0].ticks):
        yield f"  tick {tick}"
        for node, schedule in enumerate(schedules):
            for step in schedule.steps:
                if step.tick == tick and step.receive is not None:
                    yield _receive_line(step, step.receive, first_node, node, samples)


def _segment_lines(spread: Spread, samples: np.ndarray, first_node: int) -> Iterator[str]:
    s = spread.schedule.segments
    for node in range(s.nodes):
        mine = s.node == node
        work = int((s.high[mine] * (s.high[mine] + 1) - s.low[mine] * (s.low[mine] + 1)).sum()) // 2
        tokens = int((s.high[mine] - s.low[mine]).sum())
        yield f"  node {first_node + node}: {tokens:,} tokens, {work:,} query-key pairs a head"
    for document in range(len(samples)):
        mine = s.document == document
        parts = zip(s.low[mine].tolist(), s.high[mine].tolist(), s.node[mine].tolist(), strict=True)
        where = ", ".join(f"[{a}, {b}) node {first_node + node}" for a, b, node in parts)
        yield f"  sample {samples[document]}: {where}"


def _receive_line(step: Step, message: Message, first_node: int, node: int, samples: np.ndarray) -> str:
    pieces = ", ".join(f"sample {samples[p.document]} [{p.low}, {p.high})" for p in message.pieces)
    work = " + ".join(f"{w.query_end - w.query} x {w.key_end - w.key}" for w in step.work)
    source, target = first_node + message.node, first_node + node
    return f"    node {source} -> node {target}: {message.rows:,} tokens: {pieces}; then attends {work}"
