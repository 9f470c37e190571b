"""Random topologies, rounds and plans for property-based tests."""

from __future__ import annotations

from hypothesis import strategies as st

from raypack.plan.names import RECOMPUTES
from raypack.plan.plan import Placement, Plan, Round
from raypack.plan.topology import Block, Topology

NODES = st.one_of(
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    st.sampled_from([(8,), (4, 4), (2, 2, 2, 2), (9,), (6, 3), (5, 4), (3, 3, 3)]),
).filter(lambda nodes: sum(nodes) <= 9)


@st.composite
def placements(
    draw,
    topology: Topology,
    ids: range,
    longest: int = 40,
    tied: bool = False,
    gather: bool = False,
    spread: bool = False,
):
    """One placement for each id, any legal parent and child inside it; with `gather`, some whose parent is their child
    gather K and V; with `spread`, some whose parent has nodes of one size are hsap."""
    kinds = ["ulysses", *(["kv_gather"] if gather else []), *(["hsap"] if spread else [])]
    found = []
    for sample in ids:
        length = draw(st.integers(1, longest))
        parent = draw(st.sampled_from(topology.blocks))
        child = parent if tied else draw(st.sampled_from([b for b in topology.blocks if parent.contains(b)]))
        attention = draw(st.sampled_from(kinds))
        parent = child if attention == "kv_gather" else parent
        if attention == "hsap" and len(set(topology.node_sizes(parent))) > 1:
            attention = "ulysses"
        found.append(Placement(sample, length, parent, child, length - 1, attention))
    return tuple(found)


@st.composite
def rounds(draw, topology: Topology, most: int = 12, longest: int = 40):
    count = draw(st.integers(0, most))
    return Round(draw(placements(topology, range(count), longest)))


@st.composite
def plans(
    draw,
    topology: Topology,
    most: int = 8,
    longest: int = 24,
    recompute: bool = True,
    gather: bool = False,
    spread: bool = False,
):
    """A plan of one to three rounds (some may be empty) over ids 0.. with at least one sample."""
    count = draw(st.integers(1, most))
    every = draw(placements(topology, range(count), longest, gather=gather, spread=spread))
    number = draw(st.integers(1, 3))
    where = [draw(st.integers(0, number - 1)) for _ in every]
    kinds = st.sampled_from(RECOMPUTES) if recompute else st.just("none")
    made = [Round(tuple(p for p, w in zip(every, where, strict=True) if w == i), draw(kinds)) for i in range(number)]
    return Plan(nodes=topology.nodes, rounds=tuple(made))


def block(first: int, width: int) -> Block:
    return Block(first, width)
