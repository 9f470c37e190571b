"""Small steps as the planner itself plans them, for every policy and attention: what a run would do.

Plans drawn sample by sample (`strategies`) hardly ever have a pattern in them, such as "every parent is its child", and
patterns are what shortcuts of the product go by.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from raypack.config import ClusterConfig, TrainSection
from raypack.errors import RaypackError
from raypack.plan.names import POLICIES, RECOMPUTES
from raypack.plan.plan import Plan
from raypack.plan.samples import Samples
from raypack.plan.topology import Topology
from raypack.planning.policies import CHOICES, make_plan
from tests.ranks import Case, tiny_model

PATTERNS = ("FS", "SF", "FSS", "FSSS", "FSL", "LSF", "LF", "LLF", "FL", "SL", "F")
LONGEST = 24


def planned(nodes: tuple[int, ...], seed: int, each: int = 1) -> list[tuple[Case, Plan]]:
    """`each` random steps for every policy and attention that `nodes` allow."""
    uneven = len(set(nodes)) > 1
    pairs = [pair for pair in product(POLICIES, CHOICES) if not (uneven and pair[1] == "hsap")]
    rng = np.random.default_rng([seed, *nodes])
    return [_planned(rng, Topology(nodes), *pair) for pair in pairs for _ in range(each)]


def _planned(rng: np.random.Generator, topology: Topology, policy: str, attention: str) -> tuple[Case, Plan]:
    lengths = rng.integers(1, LONGEST, rng.integers(1, 6))
    lengths[0] = LONGEST  # beyond most windows, and so much of the work that ranks must share it
    longest = int(lengths.max())
    case = Case(_model(rng), _train(rng))
    options = {
        "attention": attention,
        "budget": int(rng.choice([0, 20])),
        "longest": int(rng.choice([0, 2 * LONGEST])),
        "recompute": str(rng.choice(RECOMPUTES)),
        "itemsize": 8,
    }
    # Tight caps make wide blocks and many rounds; the last one holds any sample on one rank.
    for cap in (longest * float(rng.choice([0.3, 0.6, 1.0, 2.0, 20.0])), longest):
        try:
            plan = make_plan(
                Samples.of_lengths(lengths), topology, _cluster(rng, int(cap)), case.model, policy, **options
            )
        except RaypackError as error:
            assert "fits no block" in str(error) and cap < longest, error  # noqa: PT017, PT018
        else:
            return case, plan
    raise AssertionError("unreachable")


def _model(rng: np.random.Generator):
    """A document is often longer than the window, and ranks often outnumber heads."""
    pattern = str(rng.choice(PATTERNS))
    heads, kv_heads = ((4, 2), (4, 1), (2, 2), (3, 3), (6, 2), (8, 4))[rng.integers(6)]
    return tiny_model(
        pattern=pattern,
        layers=max(len(pattern), int(rng.integers(1, 4))),
        width=8,
        heads=heads,
        kv_heads=kv_heads,
        window=int(rng.choice([1, 3, 5, 100])),
        sinks=int(rng.choice([0, 0, 2])),
        linear_decay=str(rng.choice(["none", "head", "gate"])),
        linear_conv=int(rng.choice([0, 2, 4])),
        linear_chunk=int(rng.choice([2, 8])),
        experts=int(rng.choice([0, 0, 3])),
        tied_head=bool(rng.integers(2)),
        qk_norm=bool(rng.integers(2)),
    )


def _train(rng: np.random.Generator) -> TrainSection:
    shard = "world" if rng.random() < 0.1 else "none"
    return TrainSection(dtype="float64", shard=shard, chunk_tokens=int(rng.choice([3, 1000])))


def _cluster(rng: np.random.Generator, cap: int) -> ClusterConfig:
    """Attention slow or quick beside the rest, bytes dear or cheap: wide parents, narrow children, or neither pay."""
    intra_rate = 10 ** rng.uniform(7, 10)
    return ClusterConfig(
        peak_flops=1e9,
        attention_share=float(rng.choice([1e-4, 1e-3, 1e-2])),
        intra_rate=float(intra_rate),
        inter_rate=float(intra_rate / 10 ** rng.uniform(0, 2)),
        intra_latency=float(rng.choice([0.0, 1e-5, 1e-4])),
        inter_latency=float(rng.choice([0.0, 1e-5, 1e-4])),
        launch_seconds=0.0,
        round_seconds=float(rng.choice([0.0, 1e-5])),
        rank_tokens_max=max(1, cap),
        sync=str(rng.choice(["step", "layer", "node"])),
    )
