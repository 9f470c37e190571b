"""Random small planning problems, shared by the planner's tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from raypack.config import ClusterConfig, ModelConfig
from raypack.plan.plan import Placement, Plan, Round
from raypack.plan.topology import Block, Topology

NODES = [(1,), (2,), (3,), (4,), (2, 2), (4, 3), (2, 2, 1), (3, 3), (7,), (8,), (4, 4), (5, 4), (1,) * 9]

CLUSTER = ClusterConfig(
    name="test",
    peak_flops=1e12,
    matmul_share=0.5,
    attention_share=0.25,
    intra_rate=4e9,
    inter_rate=5e8,
    intra_latency=1e-6,
    inter_latency=3e-6,
    launch_seconds=1e-6,
    round_seconds=1e-5,
    rank_tokens_max=4096,
)
MODEL = ModelConfig(name="test", layers=4, width=64, heads=7, kv_heads=7, head_dim=16, window=32, ffn_width=128)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 3))
    pattern = draw(st.sampled_from(["FSSS", "FS", "F", "S", "LLLF", "L", "FSL"]))
    linear = {"linear_decay": draw(st.sampled_from(["head", "gate"])), "linear_conv": draw(st.sampled_from([0, 4]))}
    return MODEL.model_copy(update={"heads": heads, "kv_heads": kv_heads, "pattern": pattern, **linear})


@st.composite
def plans(draw: st.DrawFn, most: int = 12, longest: int = 600) -> Plan:
    """Any legal plan: every combination of nested blocks, several rounds, empty ranks."""
    topology = Topology(draw(st.sampled_from(NODES)))
    rounds: list[list[Placement]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for sample in range(draw(st.integers(1, most))):
        parent = draw(st.sampled_from(topology.blocks))
        child = draw(st.sampled_from([b for b in topology.blocks if parent.contains(b)]))
        length = draw(st.integers(1, longest))
        even = len(set(topology.node_sizes(parent))) == 1
        kinds = ["ulysses", *(["kv_gather"] if parent == child else []), *(["hsap"] if even else [])]
        attention = draw(st.sampled_from(kinds))
        placement = Placement(sample, length, Block(*parent), Block(*child), length - 1, attention)
        rounds[draw(st.integers(0, len(rounds) - 1))].append(placement)
    how = draw(st.sampled_from(["none", "selective", "full"]))
    return Plan(topology.nodes, tuple(Round(tuple(r), how) for r in rounds))


@st.composite
def clusters(draw: st.DrawFn, caps: tuple[int, ...] = (4, 16, 64, 300, 4096)) -> ClusterConfig:
    """Rates over several powers of ten, latencies that may be zero, any sync, caps that bind and that do not."""
    rates = {name: 10.0 ** draw(st.integers(low, high)) for name, low, high in RATES}
    waits = {name: draw(st.sampled_from([0.0, 1e-6, 1e-4])) for name in WAITS}
    changes = {
        "attention_share": draw(st.sampled_from([0.01, 0.25, 1.0])),
        "rank_tokens_max": draw(st.sampled_from(caps)),
        "sync": draw(st.sampled_from(["step", "layer", "node"])),
        "prefetch_layers": draw(st.sampled_from([0, 1])),
    }
    return CLUSTER.model_copy(update=rates | waits | changes)


RATES = (("peak_flops", 9, 14), ("intra_rate", 7, 11), ("inter_rate", 5, 10))
WAITS = ("intra_latency", "inter_latency", "launch_seconds", "round_seconds")


def lengths(seed: int, count: int, longest: int = 3000) -> np.ndarray:
    """Log-normal lengths, clipped."""
    drawn = np.random.default_rng(seed).lognormal(5.5, 1.3, count)
    return np.clip(drawn, 1, longest).astype(np.int64)
