"""What the hsap tests run on every rank of the pool, and the one-rank oracle they compare with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from raypack.comm.ledger import Ledger
from raypack.comm.wire import Groups, Wire
from raypack.config import ModelConfig, load_cluster
from raypack.exchange.heads.plan import Heads, build_exchange
from raypack.exchange.heads.run import to_heads, to_tokens
from raypack.exchange.hsap.attention import hsap_attention
from raypack.exchange.hsap.plan import plan_hsap
from raypack.exchange.layout import Layout
from raypack.kernels.attention import attention
from raypack.kernels.packing import Packing
from raypack.layers.oracle import attention as reference_attention
from raypack.plan.plan import Round
from raypack.plan.topology import Topology


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    dim: int = 4
    dtype: torch.dtype = torch.float64
    step_rows: int = 8192


Key = tuple[int, int]


def content(case: Case, sample: int, length: int, what: str) -> torch.Tensor:
    """[length, vectors, dim]: "qkv", or "grad" of the output, a pure function of the sample."""
    vectors = case.heads + (2 * case.kv_heads if what == "qkv" else 0)
    generator = torch.Generator().manual_seed(1000 * sample + len(what))
    return torch.randn(length, vectors, case.dim, generator=generator, dtype=torch.float64).to(case.dtype)


def attend_on_rank(
    rank: int, world: int, case: Case, rounds: list[Round], nodes: tuple[int, ...], change: Key | None = None
) -> tuple[list[dict[Key, tuple[np.ndarray, np.ndarray]]], dict]:
    """Each round's (output, gradient of Q, K, V) by (sample, position) of this rank's rows; and the ledger."""
    topology = Topology(nodes)
    ledger = Ledger(topology, rank)
    wire = Wire(Groups(topology, torch.device("cpu"), 60.0), ledger, poison=True)
    found = []
    for round_ in rounds:
        layout = Layout(round_, topology, rank)
        into = build_exchange(layout, rank, Heads(case.heads, case.kv_heads), full=True)
        back = build_exchange(layout, rank, Heads(case.heads, case.kv_heads, kv_travels=False), full=True)
        segments = layout.segments(rank)
        samples, lengths = layout.columns["sample"][segments.placement], layout.columns["length"][segments.placement]
        rows = list(zip(samples.tolist(), lengths.tolist(), segments.low.tolist(), segments.high.tolist(), strict=True))
        x = torch.cat([torch.zeros(0, case.heads + 2 * case.kv_heads, case.dim, dtype=case.dtype),
                       *(content(case, s, n, "qkv")[a:b] for s, n, a, b in rows)])  # fmt: skip
        where = [(s, t) for s, _, a, b in rows for t in range(a, b)]
        for row, place in enumerate(where):
            if place == change:
                x[row] += 1
        x.requires_grad_()
        y = _full_layer(x, case, layout, rank, into, back, wire)
        grad = torch.cat(
            [y.new_zeros(0, case.heads, case.dim), *(content(case, s, n, "grad")[a:b] for s, n, a, b in rows)]
        )
        (y * grad).sum().backward()
        values = zip(y.detach().double().numpy(), x.grad.double().numpy(), strict=True)
        found.append({place: (a.copy(), b.copy()) for place, (a, b) in zip(where, values, strict=True)})
    dist.barrier()  # rounds may be empty: a rank that leaves at once would close what others still connect to
    return found, dict(ledger.exchanged)


def _full_layer(x, case, layout, rank, into, back, wire):
    calls = to_heads(x, into, wire, "full_in")
    if not calls:
        return x[:, : case.heads]
    outputs = []
    for call, description in zip(calls, into.calls, strict=True):
        kv_of_q = description.kv_of_q(case.heads // case.kv_heads)
        if description.spread:
            plan = plan_hsap(layout, rank, into, case.step_rows)
            outputs.append(hsap_attention(call, plan, wire))
        else:
            q0, q1, k0, k1 = description.heads
            q, k, v = call.split([q1 - q0, k1 - k0, k1 - k0], 1)
            outputs.append(attention(q, k, v, Packing(description.lengths), kv_of_q=kv_of_q))
    return to_tokens(outputs, back, wire, "full_out")


def method_on_rank(
    rank: int, world: int, case: Case, lengths: list[int], nodes: tuple[int, ...], name: str
) -> dict[Key, tuple[np.ndarray, np.ndarray]]:
    """As `attend_on_rank`, by one of the benchmark's methods; document i is sample i."""
    from benchmarks.hsap_methods import methods

    topology = Topology(nodes)
    wire = Wire(Groups(topology, torch.device("cpu"), 60.0), Ledger(topology, rank), poison=True)
    model = ModelConfig(pattern="F", layers=1, heads=case.heads, kv_heads=case.kv_heads, head_dim=case.dim)
    cluster = load_cluster("local-2x4", {"rank_tokens_max": 1000})
    method = methods(cluster, model)[name](lengths, rank, model, wire)
    vectors = case.heads + 2 * case.kv_heads
    parts = [content(case, d, lengths[d], "qkv")[a:b] for d, a, b in method.rows]
    x = torch.cat([torch.zeros(0, vectors, case.dim, dtype=case.dtype), *parts]).requires_grad_()
    y = method.run(x)
    grads = [content(case, d, lengths[d], "grad")[a:b] for d, a, b in method.rows]
    (y * torch.cat([y.new_zeros(0, case.heads, case.dim), *grads])).sum().backward()
    dist.barrier()
    where = [(d, t) for d, a, b in method.rows for t in range(a, b)]
    values = zip(y.detach().numpy(), x.grad.numpy(), strict=True)
    return {place: (a.copy(), b.copy()) for place, (a, b) in zip(where, values, strict=True)}


def oracle(case: Case, round_: Round) -> dict[Key, tuple[np.ndarray, np.ndarray]]:
    """The same, one document at a time, dense, with autograd."""
    found = {}
    for p in round_.placements:
        x = content(case, p.sample, p.length, "qkv").requires_grad_()
        q, k, v = x.split([case.heads, case.kv_heads, case.kv_heads], 1)
        y = reference_attention(q, k, v, [p.length])
        (y * content(case, p.sample, p.length, "grad")).sum().backward()
        for t in range(p.length):
            found[p.sample, t] = (y.detach()[t].double().numpy(), x.grad[t].double().numpy())
    return found
