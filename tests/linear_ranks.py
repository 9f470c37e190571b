"""What the tests of linear attention run on the ranks of the pool: documents of known q, k and v."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from raypack.comm.ledger import Ledger
from raypack.comm.wire import Groups, Wire
from raypack.exchange.halo.plan import plan_halo
from raypack.exchange.lasp2.states import plan_states
from raypack.exchange.layout import Layout
from raypack.layers.linear.conv import short_conv
from raypack.layers.linear.module import linear_attention
from raypack.plan.plan import Placement, Round
from raypack.plan.topology import Block, Topology

HEADS, KV_HEADS, DIM = 4, 2, 3


def place(sample: int, length: int, first: int, width: int) -> Placement:
    return Placement(sample, length, Block(first, width), Block(first, width), length - 1)


def round_of(width: int, *lengths: int) -> Round:
    return Round(tuple(place(i, n, 0, width) for i, n in enumerate(lengths)))


def document(kind: str, sample: int, length: int) -> dict[str, torch.Tensor]:
    """q, k, v and log decays of a document, and the weight of each output in the loss."""
    made = torch.Generator().manual_seed(100 + sample)
    shape = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "weight": HEADS}
    found = {name: torch.randn(length, n, DIM, generator=made, dtype=torch.float64) for name, n in shape.items()}
    if kind == "gate":
        found["g"] = -torch.rand(length, KV_HEADS, DIM, generator=made, dtype=torch.float64)
    if kind.startswith("ones"):
        found = {name: torch.ones_like(x) for name, x in found.items()}
    return found


def log_decay(kind: str) -> torch.Tensor | None:
    """Of constant decays."""
    if kind == "ones, decay 0.5":
        return torch.full((KV_HEADS,), 0.5, dtype=torch.float64).log()
    return torch.tensor([-0.4, -0.05], dtype=torch.float64) if kind == "head" else None


def set_up(round_: Round, nodes: tuple[int, ...]) -> tuple[Layout, Wire]:
    topology, rank = Topology(nodes), dist.get_rank()
    groups = Groups(topology, torch.device("cpu"), timeout=60.0)
    return Layout(round_, topology, rank), Wire(groups, Ledger(topology, rank), poison=True)


def rows_of(layout: Layout, rank: int, name: str, kind: str) -> torch.Tensor:
    """This rank's rows of a document tensor."""
    s = layout.segments(rank)
    like = document(kind, 0, 1)[name]
    parts = [like[:0]]
    for index, low, high in zip(s.placement, s.low, s.high, strict=True):
        sample, length = (int(layout.columns[c][index]) for c in ("sample", "length"))
        parts.append(document(kind, sample, length)[name][low:high])
    return torch.cat(parts)


def attention_on_rank(rank: int, world: int, nodes: tuple[int, ...], round_: Round, kind: str) -> dict[str, Any]:
    """Outputs and gradients by (sample, position), and the ledger."""
    layout, wire = set_up(round_, nodes)
    segments = layout.segments(rank)
    plan = plan_states(layout, rank, segments)
    names = ["q", "k", "v", *(["g"] if kind == "gate" else [])]
    leaves = {name: rows_of(layout, rank, name, kind).requires_grad_() for name in names}
    g = leaves["g"] if kind == "gate" else log_decay(kind)
    q = leaves["q"].unflatten(1, (KV_HEADS, HEADS // KV_HEADS))
    out = linear_attention(q, leaves["k"], leaves["v"], g, plan, wire, chunk=4).flatten(1, 2)
    loss = (out * rows_of(layout, rank, "weight", kind)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    samples = np.repeat(layout.columns["sample"][segments.placement], segments.lengths)
    where = list(zip(samples.tolist(), segments.positions.tolist(), strict=True))
    found: dict[str, Any] = {"collected": dict(wire.ledger.collected), "where": where, "out": out.detach().numpy()}
    found.update({f"d{name}": grad.numpy() for name, grad in zip(leaves, grads, strict=True)})
    return found


def conv_on_rank(rank: int, world: int, nodes: tuple[int, ...], round_: Round, taps: int, ones: bool) -> Any:
    layout, wire = set_up(round_, nodes)
    segments = layout.segments(rank)
    plan = plan_halo(layout, rank, segments, taps)
    x = torch.cat([rows_of(layout, rank, n, "ones" if ones else "none") for n in ("q", "k")], 1).flatten(1)
    weights = rows_of(layout, rank, "weight", "none").flatten(1)
    weights = torch.cat([weights, weights], 1)[:, : x.shape[1]]
    made = torch.Generator().manual_seed(1)
    weight = torch.randn(x.shape[1], taps, generator=made, dtype=torch.float64)
    weight = (torch.ones_like(weight) if ones else weight).requires_grad_()
    out = short_conv(x.requires_grad_(), weight, plan, wire)
    dx, dweight = torch.autograd.grad((out * weights).sum(), (x, weight))
    dist.all_reduce(dweight)
    samples = np.repeat(layout.columns["sample"][segments.placement], segments.lengths)
    where = list(zip(samples.tolist(), segments.positions.tolist(), strict=True))
    return where, out.detach().numpy(), dx.numpy(), dweight.numpy()


def gather_on_rank(rank: int, world: int, nodes: tuple[int, ...], round_: Round, kind: str) -> dict:
    layout, wire = set_up(round_, nodes)
    plan = plan_states(layout, rank, layout.segments(rank))
    rows = layout.rows(rank)
    q = torch.ones(rows, KV_HEADS, 2, DIM, dtype=torch.float64, requires_grad=True)
    k = torch.ones(rows, KV_HEADS, DIM, dtype=torch.float64)
    g = torch.zeros(rows, KV_HEADS, DIM, dtype=torch.float64, requires_grad=True) if kind == "gate" else None
    linear_attention(q, k.requires_grad_(), k, g, plan, wire, chunk=64).sum().backward()
    return dict(wire.ledger.collected)
