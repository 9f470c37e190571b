"""The plan of one step: plain, hashable, replayable data (docs/planning.md, The plan file).

A `Placement` is the whole decision about one sample: its *parent* block computes its full attention, its *child*
block (inside the parent) holds its tokens everywhere else. Placements that run together form a `Round`; a `Plan` is
the rounds of one step for a given topology.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from raypack.errors import RaypackError
from raypack.parallel.topology import Block, Topology

PLAN_VERSION = 1
ATTENTIONS = ("ulysses", "kv_gather", "hsap")
RECOMPUTES = ("none", "selective", "full")
LENGTH_MAX = (1 << 31) - 1
"""Tokens of one sample: the pairs of its full attention must fit into 64 bits."""
NUMBER_MAX = (1 << 63) - 1
POLICIES = ("static", "dynamic", "repack", "repack+parents", "joint")


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


def plan_from_json(text: str) -> Plan:
    """Read and check a plan, complete or made elsewhere (short forms of docs/planning.md).

    Raises:
        RaypackError: not JSON, an unknown or missing key, a value of the wrong kind, or an illegal plan
            (see `check_plan`).
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RaypackError(f"plan is not JSON: {error}") from None
    return plan_from_data(data)


def plan_from_data(data: Any) -> Plan:
    """As `plan_from_json`, from parsed JSON."""
    top = _object(data, "plan", {"version", "nodes", "ranks", "ranks_per_node", "step", "policy", "stream", "rounds"})
    version = top.get("version", PLAN_VERSION)
    if version != PLAN_VERSION or isinstance(version, bool):
        raise RaypackError(f"plan version = {version!r}: this raypack reads version {PLAN_VERSION}")
    nodes = _nodes(top)
    stream = _object(top.get("stream") or {}, "plan stream", {"before", "after"})
    policy = top.get("policy", "given")
    if not isinstance(policy, str):
        raise RaypackError(f"plan policy = {policy!r}: must be text")
    rounds = top.get("rounds")
    if not isinstance(rounds, list) or not rounds:
        raise RaypackError("plan rounds: must be a list of at least one round")
    plan = Plan(
        nodes=nodes,
        rounds=tuple(_round(r, f"round {i}") for i, r in enumerate(rounds)),
        step=_integer(top.get("step", 0), "plan step", 0),
        policy=policy,
        before=_stream_state(stream.get("before"), "plan stream before"),
        after=_stream_state(stream.get("after"), "plan stream after"),
    )
    check_plan(plan)
    return plan


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


def _object(data: Any, where: str, allowed: set[str]) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise RaypackError(f"{where}: must be a JSON object, not {type(data).__name__}")
    unknown = sorted(set(data) - allowed)
    if unknown:
        raise RaypackError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(allowed))}")
    return data


def _integer(value: Any, where: str, least: int, most: int = NUMBER_MAX) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RaypackError(f"{where} = {value!r}: must be an integer of at least {least}")
    if value > most:
        raise RaypackError(f"{where} = {value!r}: must be at most {most}")
    return value


def _nodes(top: Mapping[str, Any]) -> tuple[int, ...]:
    if "nodes" in top:
        if "ranks" in top or "ranks_per_node" in top:
            raise RaypackError("plan: give either nodes or ranks and ranks_per_node, not both")
        if not isinstance(top["nodes"], list) or not top["nodes"]:
            raise RaypackError(f"plan nodes = {top['nodes']!r}: must be a list of rank counts, e.g. [8, 8]")
        return tuple(_integer(n, f"plan nodes[{i}]", 1) for i, n in enumerate(top["nodes"]))
    if "ranks" not in top:
        raise RaypackError("plan: needs nodes (e.g. [8, 8]), or ranks and ranks_per_node")
    ranks = _integer(top["ranks"], "plan ranks", 1)
    return Topology.regular(ranks, _integer(top.get("ranks_per_node", ranks), "plan ranks_per_node", 1)).nodes


def _stream_state(data: Any, where: str) -> StreamState | None:
    if data is None or data == {}:
        return None
    fields = _object(data, where, set(StreamState._fields))
    missing = [f for f in StreamState._fields if f not in fields]
    if missing:
        raise RaypackError(f"{where}: lacks {missing[0]!r}")
    return StreamState(*(_integer(fields[f], f"{where} {f}", 0) for f in StreamState._fields))


def _round(data: Any, where: str) -> Round:
    fields = {"placements": data} if isinstance(data, list) else _object(data, where, {"recompute", "placements"})
    placements = fields.get("placements")
    if not isinstance(placements, list):
        raise RaypackError(f"{where}: placements must be a list")
    made = tuple(_placement(p, f"{where}, placement {i}") for i, p in enumerate(placements))
    return Round(made, str(fields.get("recompute", "none")))


def _placement(data: Any, where: str) -> Placement:
    fields = _object(data, where, {"sample", "length", "labels", "parent", "child", "attention"})
    missing = [f for f in ("sample", "length", "parent", "child") if f not in fields]
    if missing:
        raise RaypackError(f"{where}: lacks {missing[0]!r}")
    length = _integer(fields["length"], f"{where} length", 1, LENGTH_MAX)
    return Placement(
        sample=_integer(fields["sample"], f"{where} sample", 0),
        length=length,
        parent=_block(fields["parent"], f"{where} parent"),
        child=_block(fields["child"], f"{where} child"),
        labels=_integer(fields.get("labels", length - 1), f"{where} labels", 0),
        attention=fields.get("attention", "ulysses"),
    )


def _block(data: Any, where: str) -> Block:
    if not isinstance(data, list) or len(data) != 2:
        raise RaypackError(f"{where} = {data!r}: must be [first, width]")
    return Block(_integer(data[0], f"{where} first", 0), _integer(data[1], f"{where} width", 1))
