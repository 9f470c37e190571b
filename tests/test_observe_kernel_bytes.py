"""Ledger truth: its bytes are those that the kernel sends between and inside two simulated nodes.

Four ranks, two on each node. A node is a network namespace: bytes to the other node leave through `eth0`, bytes between
the ranks of a node through `lo`. What the kernel counts besides the ledger's bytes:

- steps without labels, which only agree, and the meter's own barriers: measured and subtracted;
- headers: 52 bytes of IP and TCP a packet, 66 with Ethernet on `eth0`; a packet holds 20 to 60 KB (the kernel cuts
  segments below the interface), an acknowledgement none: 0.2 to 0.4 %;
- gloo's own header of each message: under 0.2 %;
- what TCP sends again, which the kernel counts in segments.

So the kernel's count is never below the ledger's, and at most `TOLERANCE` above it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from raypack.comm.ledger import Ledger
from raypack.config import TrainSection
from raypack.plan.names import EXCHANGE_SITES, SCOPES
from raypack.plan.plan import Placement, Plan, Round
from raypack.plan.topology import Block, Topology
from raypack.training.step import train_step
from raypack.training.work import prepare
from tests.observe_nodes import NODES, Bytes, Counted, Meter, NodesPool
from tests.ranks import Case, loader, make_trainer, tiny_model
from tests.simulated_nodes import SimulatedCluster, why_not

pytestmark = [pytest.mark.pool, pytest.mark.rest, pytest.mark.skipif(bool(why_not()), reason=why_not() or "possible")]

TOLERANCE = 0.01
STEPS = 2
BUFFER_BYTES = 16_000_000
PASSES = {"nothing": 0, "all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
TOO_SMALL = "metric_reduce"
"""A few hundred bytes: whether it is counted can't be seen."""


def place(sample: int, length: int, parent: Block, child: Block, attention: str = "ulysses") -> Placement:
    return Placement(sample, length, parent, child, length - 1, attention)


WHOLE, FIRST, SECOND = Block(0, 4), Block(0, 2), Block(2, 2)
PLAN = Plan(
    NODES,
    (
        Round((place(0, 3000, WHOLE, FIRST), place(1, 2501, WHOLE, SECOND))),
        Round((place(2, 2000, WHOLE, WHOLE),)),
        Round((place(3, 1500, FIRST, FIRST), place(4, 1200, SECOND, Block(2, 1)))),
        Round((place(5, 1600, WHOLE, WHOLE, "hsap"),)),
    ),
)
# A vocabulary that makes gradients count beside the exchanges.
MODEL = tiny_model(width=32, heads=8, kv_heads=4, head_dim=32, window=64, vocabulary=4096)
TRAIN = TrainSection(dtype="float32", chunk_tokens=1024)
CASE = Case(MODEL, TRAIN)
SHARDED = Case(MODEL, TRAIN.model_copy(update={"shard": "world"}))
# Taps and heads that make halos and states count beside keys and values.
LINEAR_MODEL = tiny_model(
    pattern="LF", width=32, heads=8, kv_heads=8, head_dim=32, linear_decay="gate", linear_conv=64, experts=0
)
LINEAR = Case(LINEAR_MODEL, TRAIN)
LINEAR_PLAN = Plan(NODES, (Round((place(0, 1000, WHOLE, WHOLE, "kv_gather"),)),))


def steps_on_rank(rank: int, world: int, case: Case, plan: Plan) -> tuple[dict[str, int], Bytes]:
    """`STEPS` steps after one to warm up: what this rank's node sent, and this rank's ledger."""
    trainer = make_trainer(case, plan.topology, poison=False)
    work = prepare(plan, plan.topology, rank, case.model, loader(case))
    train_step(trainer, work)
    trainer.wire.ledger.take()
    meter = Meter()
    for _ in range(STEPS):
        train_step(trainer, work)
    sent, ledger = meter.read(), trainer.wire.ledger
    return sent, dict(ledger.exchanged + ledger.collected)


def collective_on_rank(rank: int, world: int, op: str) -> tuple[dict[str, int], Bytes]:
    """One bare collective over `BUFFER_BYTES`: what this rank's node sent, and the ring formula's bytes."""
    whole = torch.ones(BUFFER_BYTES // 4)
    part = torch.ones(len(whole) // world)
    calls = {
        "nothing": lambda: None,
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }
    calls[op]()
    meter = Meter()
    calls[op]()
    ledger = Ledger(Topology(NODES), rank)
    ledger.count_ring(op, Block(0, world), PASSES[op], BUFFER_BYTES)
    return meter.read(), dict(ledger.collected)


@pytest.fixture(scope="module")
def nodes():
    with SimulatedCluster(NODES, ray=False, env={"OMP_NUM_THREADS": "1"}) as cluster:
        pool = NodesPool(cluster)
        yield pool
        pool.close()


@pytest.fixture(scope="module")
def idle(nodes) -> Counted:
    """Steps without labels: they agree, and that is all."""
    rounds = tuple(Round(tuple(p._replace(labels=0) for p in r.placements)) for r in PLAN.rounds)
    case = replace(CASE, masked=tuple(p.sample for p in PLAN.placements))
    found = nodes.counted(steps_on_rank, case, replace(PLAN, rounds=rounds))
    assert not found.ledger
    assert 0 < sum(found.kernel.values()) < 100_000
    return found


def misfit(found: Counted, idle: Counted, expected: Bytes) -> str:
    """Where the kernel's count is not that of `expected` and what TCP adds; "" where it is in both scopes."""
    for scope in SCOPES:
        low = sum(size for (_, where), size in expected.items() if where == scope)
        sent, high = found.kernel[scope] - idle.kernel[scope], (1 + TOLERANCE) * low + found.again
        if not low <= sent <= high:
            return f"{scope}: the kernel sent {sent:,}, not in [{low:,}, {high:,.0f}]"
    return ""


def times(factor: int, name: str, bytes_: Bytes) -> Bytes:
    """`bytes_` with those of one site or op multiplied."""
    return {key: size * (factor if key[0] == name else 1) for key, size in bytes_.items()}


def around_the_ring(bytes_: Bytes) -> Bytes:
    """As gloo sends it: all-gathers go around the ring, half of whose hops cross nodes here.

    `state_gather` gathers in both directions, `kv_gather` in the forward; its backward is an exchange.
    """
    sent = Counter(bytes_)
    for op, share in (("state_gather", 1.0), ("kv_gather", 0.5)):
        gathered = {scope: share * bytes_[op, scope] for scope in SCOPES}
        for scope in SCOPES:
            sent[op, scope] += round(sum(gathered.values()) / 2 - gathered[scope])
    return dict(sent)


def assert_kernel_sent(found: Counted, idle: Counted, expected: Bytes) -> None:
    """`expected` fits, and would not if any one entry were missing or there twice."""
    assert misfit(found, idle, expected) == ""
    for name in {name for name, _ in expected} - {TOO_SMALL}:
        assert misfit(found, idle, times(0, name, expected)), f"{name} could be missing"
        assert misfit(found, idle, times(2, name, expected)), f"{name} could be counted twice"


def test_bytes_of_exchanges_and_gradients_are_those_the_kernel_sent(nodes, idle) -> None:
    found = nodes.counted(steps_on_rank, CASE, PLAN)
    assert {name for name, _ in found.ledger} == {*EXCHANGE_SITES, "gradient_reduce", TOO_SMALL}
    assert_kernel_sent(found, idle, found.ledger)


def test_bytes_of_linear_layers_are_those_the_kernel_sent(nodes, idle) -> None:
    found = nodes.counted(steps_on_rank, LINEAR, LINEAR_PLAN)
    named = {name for name, _ in found.ledger}
    assert named == {"state_gather", "conv_halo", "kv_gather", "gradient_reduce", TOO_SMALL}
    sent = around_the_ring(found.ledger)
    assert sum(sent.values()) == sum(found.ledger.values())
    assert_kernel_sent(found, idle, sent)


def test_bytes_of_sharded_parameters_are_those_the_kernel_sent(nodes, idle) -> None:
    found = nodes.counted(steps_on_rank, SHARDED, PLAN)
    assert {"parameter_gather", "gradient_reduce"} < {name for name, _ in found.ledger}
    # Gloo scatters a sum by an all-reduce: see the last test.
    assert_kernel_sent(found, idle, times(2, "gradient_reduce", found.ledger))


@pytest.mark.parametrize(("op", "factor"), [("all_reduce", 1), ("all_gather", 1), ("reduce_scatter", 2)])
def test_the_ring_formula_is_what_gloo_sends_but_for_a_reduce_scatter(nodes, op: str, factor: int) -> None:
    nothing = nodes.counted(collective_on_rank, "nothing")
    found = nodes.counted(collective_on_rank, op)
    assert misfit(found, nothing, times(factor, op, found.ledger)) == ""
