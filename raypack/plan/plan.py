"""The plan of one step: plain, hashable, replayable data (docs/planning.md, The plan file).

A `Placement` is the whole decision about one sample: its *parent* block computes its full attention, its *child*
block (inside the parent) holds its tokens everywhere else. Placements that run together form a `Round`; a `Plan` is
the rounds of one step for a given topology.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from raypack.errors import RaypackError
from raypack.plan.names import ATTENTIONS, RECOMPUTES
from raypack.plan.topology import Block, Topology

PLAN_VERSION = 1


class Placement(NamedTuple):
    """Where one sample runs. `labels` = number of its tokens that carry a label (`length - 1` for plain text)."""

    sample: int
    length: int
    parent: Block
    child: Block
    labels: int
    attention: str = "ulysses"

    @property
    def order(self) -> tuple[int, int, int, int, int]:
        """Canonical order: parent width descending, parent first, child width descending, child first, sample."""
        return (-self.parent.width, self.parent.first, -self.child.width, self.child.first, self.sample)


class StreamState(NamedTuple):
    """Position in the sample stream; the next step is a pure function of it."""

    seed: int
    epoch: int
    next_sample: int


@dataclass(frozen=True)
class Round:
    """Placements that run together, held in canonical order whatever order they are given in."""

    placements: tuple[Placement, ...]
    recompute: str = "none"

    def __post_init__(self) -> None:
        object.__setattr__(self, "placements", tuple(sorted(self.placements, key=lambda p: p.order)))

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """The placements as int64 arrays: sample, length, labels, parent_first/width, child_first/width, attention
        (index into `ATTENTIONS`)."""
        codes = {name: code for code, name in enumerate(ATTENTIONS)}
        rows = [(p.sample, p.length, p.labels, *p.parent, *p.child, codes[p.attention]) for p in self.placements]
        blocks = ("parent_first", "parent_width", "child_first", "child_width")
        names = ("sample", "length", "labels", *blocks, "attention")
        table = np.array(rows, dtype=np.int64).reshape(len(rows), len(names))
        return {name: np.ascontiguousarray(table[:, i]) for i, name in enumerate(names)}


@dataclass(frozen=True)
class Plan:
    """The rounds of one step on `nodes` (ranks of each node)."""

    nodes: tuple[int, ...]
    rounds: tuple[Round, ...]
    step: int = 0
    policy: str = "given"
    before: StreamState | None = None
    after: StreamState | None = None

    @cached_property
    def topology(self) -> Topology:
        return Topology(self.nodes)

    @property
    def placements(self) -> Iterable[Placement]:
        return (p for r in self.rounds for p in r.placements)

    @cached_property
    def labels(self) -> int:
        """Valid labels of the whole step: the divisor of its loss on every rank and in every round."""
        return sum(p.labels for p in self.placements)

    @cached_property
    def tokens(self) -> int:
        return sum(p.length for p in self.placements)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical JSON: equal on two machines exactly when the plans are equal."""
        return hashlib.sha256(self.to_json().encode()).digest()

    def __hash__(self) -> int:
        return int.from_bytes(self.digest[:8], "big")

    def at(self, step: int, before: StreamState | None, after: StreamState | None) -> Plan:
        """The same rounds as the plan of `step`, between the stream states `before` and `after`."""
        return replace(self, step=step, before=before, after=after)

    def to_data(self) -> dict[str, Any]:
        """The JSON object of docs/planning.md, complete (no defaults left out)."""
        stream = {
            "before": self.before._asdict() if self.before else None,
            "after": self.after._asdict() if self.after else None,
        }
        return {
            "version": PLAN_VERSION,
            "nodes": list(self.nodes),
            "step": self.step,
            "policy": self.policy,
            "stream": stream,
            "rounds": [
                {"recompute": r.recompute, "placements": [_placement_data(p) for p in r.placements]}
                for r in self.rounds
            ],
        }

    def to_json(self) -> str:
        """Canonical text: sorted keys, no spaces."""
        return json.dumps(self.to_data(), sort_keys=True, separators=(",", ":"))


def _placement_data(p: Placement) -> dict[str, Any]:
    return {
        "sample": p.sample,
        "length": p.length,
        "labels": p.labels,
        "parent": list(p.parent),
        "child": list(p.child),
        "attention": p.attention,
    }


def check_plan(plan: Plan) -> None:
    """Refuse an illegal plan by name.

    Raises:
        RaypackError: a sample twice, a block that is no block, a child outside its parent, a length or label count
            out of range, an unknown attention or recompute, `kv_gather` with parent != child, `hsap` with a parent
            over nodes of unequal size.
    """
    topology, seen = plan.topology, set()
    for number, each in enumerate(plan.rounds):
        if each.recompute not in RECOMPUTES:
            raise RaypackError(f"round {number}: recompute = {each.recompute!r}: one of {', '.join(RECOMPUTES)}")
        for p in each.placements:
            where = f"round {number}, sample {p.sample}"
            if p.sample in seen:
                raise RaypackError(f"{where}: the sample occurs twice in the plan; place each sample once")
            seen.add(p.sample)
            if p.length < 1:
                raise RaypackError(f"{where}: length = {p.length}: must be at least 1")
            if not 0 <= p.labels <= p.length:
                raise RaypackError(f"{where}: labels = {p.labels}: must lie in 0..{p.length} (the sample's length)")
            for name, block in (("parent", p.parent), ("child", p.child)):
                if not topology.is_block(block):
                    raise RaypackError(
                        f"{where}: {name} {block} is no block of nodes {list(plan.nodes)}: "
                        f"legal widths are {', '.join(map(str, topology.widths))}, aligned"
                    )
            if not p.parent.contains(p.child):
                raise RaypackError(f"{where}: child {p.child} lies outside its parent {p.parent}")
            if p.attention not in ATTENTIONS:
                raise RaypackError(f"{where}: attention = {p.attention!r}: one of {', '.join(ATTENTIONS)}")
            if p.attention == "kv_gather" and p.parent != p.child:
                raise RaypackError(
                    f"{where}: kv_gather needs parent = child, not parent {p.parent}, child {p.child}; "
                    "make them equal or use ulysses"
                )
            if p.attention == "hsap" and len(sizes := topology.node_sizes(p.parent)) > 1 and len(set(sizes)) > 1:
                first = topology.node_of[p.parent.first]
                named = ", ".join(f"node {first + i} has {size} ranks" for i, size in enumerate(sizes))
                raise RaypackError(
                    f"{where}: hsap needs nodes of equal size in its parent {p.parent}, but {named}; use ulysses there"
                )
