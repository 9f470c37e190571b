"""Plans as files: read and checked, complete or made elsewhere (docs/planning.md, The plan file)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raypack.errors import RaypackError
from raypack.plan.plan import PLAN_VERSION, Placement, Plan, Round, StreamState, check_plan
from raypack.plan.topology import Block, Topology

LENGTH_MAX = (1 << 31) - 1
"""Tokens of one sample: the pairs of its full attention must fit into 64 bits."""


NUMBER_MAX = (1 << 63) - 1


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
