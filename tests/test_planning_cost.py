"""FLOPs, bytes and memory of a round: brute force against the planner's arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypack.config import ModelConfig, load_cluster, load_model
from raypack.cost.rates import PASSES, causal_pairs, window_pairs
from raypack.exchange.gathered.plan import plan_gather
from raypack.exchange.heads.plan import Heads
from raypack.exchange.hsap.plan import build_routes
from raypack.exchange.hsap.spread import build_spread
from raypack.exchange.lasp2.states import plan_states
from raypack.exchange.layout import Layout, head_share
from raypack.layers.costs import Costs, model_flops, train_flops
from raypack.plan.plan import Placement, Plan, Round
from raypack.plan.table import table_of
from raypack.plan.topology import Block, Topology
from raypack.planning.clock import pack_seconds, run_clock
from raypack.planning.load import load_rounds
from tests.planning_cases import CLUSTER, MODEL, models, plans


@given(st.integers(1, 90), st.integers(1, 40), st.integers(0, 6))
def test_pairs_are_those_of_the_mask(n: int, window: int, sinks: int) -> None:
    query, key = np.arange(n)[:, None], np.arange(n)[None, :]
    seen = (key <= query) & ((query - key < window) | (key < sinks))
    assert window_pairs([n], window, sinks)[0] == seen.sum()
    assert causal_pairs([n])[0] == (key <= query).sum()


def test_one_long_and_ten_short_samples_have_equal_tokens_but_not_equal_pairs() -> None:
    assert causal_pairs([1000]).sum() == 500_500
    assert causal_pairs([100] * 10).sum() == 50_500


def test_flops_of_the_30b_preset_are_six_times_its_active_parameters() -> None:
    model = load_model("1f3s-30b-a3b")
    parts = train_flops(model, [1000])
    attention = 48 * (2048 * 128 * (32 + 4 + 4) + 32 * 128 * 2048)
    experts = 48 * (8 * 3 * 2048 * 768 + 2048 * 128)
    assert parts["projections"][0] == 6000 * 48 * (2 * 2048 * 128 * 36)
    assert parts["projections"][0] + parts["feed_forward"][0] == 6000 * (attention + experts)
    assert parts["head"][0] == 6000 * 2048 * 151_936
    assert parts["full"][0] == 3 * 12 * 4 * 32 * 128 * 500_500
    assert model_flops(model, [1000]) == pytest.approx(sum(part[0] for part in parts.values()))


def brute_bytes(plan: Plan, model: ModelConfig, itemsize: int) -> dict[tuple[str, str], int]:
    """Token by token and head by head, from the layouts that the job itself uses."""
    topology, total = plan.topology, {}
    kinds = {"full": model.kinds.count("F"), "sparse": model.kinds.count("S")}
    for each in plan.rounds:
        layout = Layout(each, topology)
        for kind, layers in kinds.items():
            times = layers * PASSES[each.recompute].exchange * model.head_dim * itemsize
            for rank in range(topology.world):
                segments = layout.segments(rank)
                for index, tokens in zip(segments.placement.tolist(), segments.lengths.tolist(), strict=True):
                    placement = each.placements[index]
                    block = placement.parent if kind == "full" else placement.child
                    if kind == "full" and (placement.attention == "kv_gather" or spans_with_hsap(placement, topology)):
                        continue
                    share = head_share(model.heads, model.kv_heads, block.width)
                    for other in range(block.first, block.end):
                        if other == rank:
                            continue
                        lo, hi, kv_lo, kv_hi = share[other - block.first]
                        scope = "intra" if topology.node_of[other] == topology.node_of[rank] else "inter"
                        back = "inter" if scope == "inter" else "intra"
                        sites = {f"{kind}_in": hi - lo + 2 * (kv_hi - kv_lo), f"{kind}_out": hi - lo}
                        for site, heads in sites.items():
                            key = (site, back if site.endswith("out") else scope)
                            total[key] = total.get(key, 0) + tokens * heads * times
        passes = PASSES[each.recompute].exchange
        for found in (gathered_bytes(layout, model, passes, itemsize), spread_bytes(layout, model, passes, itemsize)):
            for key, size in found.items():
                total[key] = total.get(key, 0) + size
    return {key: value for key, value in total.items() if value}


def spans_with_hsap(placement: Placement, topology: Topology) -> bool:
    return placement.attention == "hsap" and not topology.in_one_node(placement.parent)


def spread_bytes(layout: Layout, model: ModelConfig, passes: int, itemsize: int) -> dict[tuple[str, str], int]:
    """hsap over nodes, token by token and head by head, from the segments and routes that the layers use."""
    topology, total = layout.topology, {}
    unit = model.kinds.count("F") * model.head_dim * itemsize

    def add(site: str, rank: int, other: int, size: int) -> None:
        scope = "intra" if topology.node_of[other] == topology.node_of[rank] else "inter"
        total[site, scope] = total.get((site, scope), 0) + (size * unit if other != rank else 0)

    for rank in range(topology.world):
        spread = build_spread(layout, rank)
        if spread is None:
            continue
        share = head_share(model.heads, model.kv_heads, spread.width)
        s, held = spread.schedule.segments, layout.segments(rank)
        for index, low, high in zip(held.placement.tolist(), held.low.tolist(), held.high.tolist(), strict=True):
            for document in np.flatnonzero(spread.placements == index).tolist():
                mine = s.document == document
                for a, b, node in zip(s.low[mine].tolist(), s.high[mine].tolist(), s.node[mine].tolist(), strict=True):
                    for i, (q0, q1, k0, k1) in enumerate(share):
                        other = spread.node_block(node).first + i
                        tokens = max(0, min(b, high) - max(a, low))
                        add("full_in", rank, other, passes * tokens * (q1 - q0 + 2 * (k1 - k0)))
                        add("full_out", other, rank, passes * tokens * (q1 - q0))
        routes = build_routes(spread, Heads(model.heads, model.kv_heads), spread.block)
        for leg in routes.legs:
            first, end = leg.parts[routes.index]
            if leg.target is not None:
                add("kv_exchange", rank, leg.target, passes * leg.sent * routes.vectors)
            if leg.source is not None:
                add("kv_exchange", rank, leg.source, (end - first) * routes.vectors)
            for i, other in enumerate(routes.sharers):
                low, high = leg.parts[i]
                add("kv_exchange", rank, other, (passes * (end - first) + (high - low)) * routes.vectors)
    return total


def gathered_bytes(layout: Layout, model: ModelConfig, passes: int, itemsize: int) -> dict[tuple[str, str], int]:
    """The gathers of a round, by the plans that the layers themselves use."""
    topology, total = layout.topology, {}
    wide = max(4, itemsize)
    state = model.kv_heads * model.head_dim**2
    gates = model.kv_heads * model.head_dim * (model.linear_decay == "gate")
    for rank in range(topology.world):
        states = plan_states(layout, rank, layout.segments(rank))
        size = wide * len(states.widths) * (state * passes + gates * (passes - 1)) * model.kinds.count("L")
        sends = [("state_gather", states.block, size)]
        keys = plan_gather(layout, rank)
        for block in keys.blocks if keys is not None else ():
            rows = block.longest * 2 * model.kv_heads * model.head_dim * itemsize
            sends.append(("kv_gather", block.block, rows * passes * model.kinds.count("F")))
        for op, block, sent in sends:
            for other in set(range(block.first, block.end)) - {rank}:
                scope = "intra" if topology.node_of[other] == topology.node_of[rank] else "inter"
                total[op, scope] = total.get((op, scope), 0) + sent
    return total


@settings(max_examples=60, deadline=None)
@given(plans(), models(), st.sampled_from([2, 4]))
def test_bytes_are_those_of_the_layouts(plan: Plan, model: ModelConfig, itemsize: int) -> None:
    loads = load_rounds(table_of(plan), plan.topology, Costs(model, CLUSTER, itemsize))
    found: dict[tuple[str, str], int] = {}
    for load in loads:
        for site, scopes in load.sent.items():
            for scope, values in zip(("intra", "inter"), scopes, strict=True):
                found[site, scope] = found.get((site, scope), 0) + int(values.sum())
    assert {key: value for key, value in found.items() if value} == brute_bytes(plan, model, itemsize)


@settings(max_examples=60, deadline=None)
@given(plans())
def test_tokens_of_every_rank_are_those_of_the_layout(plan: Plan) -> None:
    loads = load_rounds(table_of(plan), plan.topology, Costs(MODEL, CLUSTER))
    for each, load in zip(plan.rounds, loads, strict=True):
        layout = Layout(each, plan.topology)
        assert load.tokens.tolist() == [layout.rows(rank) for rank in range(plan.topology.world)]


@settings(max_examples=40, deadline=None)
@given(plans(), models())
def test_no_work_is_lost_or_made_up(plan: Plan, model: ModelConfig) -> None:
    costs = Costs(model, CLUSTER.model_copy(update={"launch_seconds": 0.0}))
    loads = load_rounds(table_of(plan), plan.topology, costs)
    for each, load in zip(plan.rounds, loads, strict=True):
        n = np.array([p.length for p in each.placements], dtype=np.int64)
        for layer, part in zip(costs.layers, load.layers, strict=True):
            work = layer.pairs(n).sum() * layer.attention_seconds(each.recompute)
            assert part.compute.sum() == pytest.approx(work + n.sum() * layer.token_seconds(each.recompute))
        assert load.linear.sum() == pytest.approx(n.sum() * costs.layer_seconds(each.recompute))


def test_a_full_layer_sends_only_through_the_childs_links() -> None:
    """A wide parent over a narrow child gains no bandwidth: the child's rank sends everything."""
    costs = Costs(MODEL.model_copy(update={"heads": 8, "kv_heads": 8, "pattern": "F"}), CLUSTER)
    plan = Plan((4, 4), (Round((Placement(0, 800, Block(0, 8), Block(0, 1), 799),)),))
    load = load_rounds(table_of(plan), plan.topology, costs)[0]
    sender = 2 * 800 * 4 * costs.head_bytes * (3 + 1) / CLUSTER.inter_rate
    assert load.of("F").exchange[0] == pytest.approx(sender)
    assert load.of("F").exchange[4] == pytest.approx(sender / 4)


def test_seconds_of_a_pack_are_its_largest_full_part_plus_its_largest_cheap_part() -> None:
    costs = Costs(MODEL.model_copy(update={"heads": 8, "kv_heads": 8}), CLUSTER)
    placements = (
        Placement(0, 1000, Block(0, 4), Block(0, 2), 999),
        Placement(1, 300, Block(3, 1), Block(3, 1), 299),
    )
    plan = Plan((4,), (Round(placements),))
    loads = load_rounds(table_of(plan), plan.topology, costs)
    packs = pack_seconds(loads[0], costs)
    pair = costs.layers[0].attention_seconds("none")
    long_full = causal_pairs([1000])[0] * pair / 4
    full = long_full + causal_pairs([300])[0] * pair + 2 * 2 * CLUSTER.launch_seconds
    linear = 4 * costs.layer_seconds("none")
    window = 3 * (window_pairs([1000], 32)[0] * pair / 2 + 2 * CLUSTER.launch_seconds)
    sent = 3 * 2 * 500 * (12 + 4) * costs.head_bytes / CLUSTER.intra_rate
    cheap = 500 * linear + window + sent + 3 * 4 * CLUSTER.intra_latency
    assert packs.full[0] == pytest.approx(full)
    assert packs.cheap[0] == pytest.approx(cheap)
    seconds = run_clock(loads, plan.topology, costs, "step").seconds
    assert seconds == pytest.approx(full + cheap + packs.exchange[0])


@pytest.mark.parametrize(("busy", "quick"), [(0, 1), (1, 0)])
def test_a_pack_starts_when_the_last_of_its_ranks_has_left_the_round_before(busy: int, quick: int) -> None:
    """Whichever rank is the last."""
    costs = Costs(MODEL, CLUSTER)

    def alone(sample: int, length: int, rank: int) -> Placement:
        return Placement(sample, length, Block(rank, 1), Block(rank, 1), 0)

    first = Round((alone(0, 900, busy), alone(1, 100, quick)))
    second = Round((alone(2, 400, quick),))
    third = Round((Placement(3, 200, Block(0, 2), Block(0, 2), 0),))
    plan = Plan((2,), (first, second, third))
    loads = load_rounds(table_of(plan), plan.topology, costs)
    a, b, c = (pack_seconds(load, costs).seconds for load in loads)
    assert a[busy] > a[quick] + b[0]
    assert run_clock(loads, plan.topology, costs, "step").seconds == pytest.approx(a[busy] + c[0])


def test_in_lockstep_every_layer_waits_for_the_slowest_rank_and_prefetch_gives_slack() -> None:
    lock = CLUSTER.model_copy(update={"prefetch_layers": 0, "launch_seconds": 0.0, "round_seconds": 0.0})
    # Rank 0 has long attention, rank 1 many tokens: their layers peak at different times.
    tokens = tuple(Placement(1 + i, 40, Block(1, 1), Block(1, 1), 0) for i in range(100))
    plan = Plan((2,), (Round((Placement(0, 1500, Block(0, 1), Block(0, 1), 0), *tokens)),))
    costs = Costs(MODEL, lock)
    load = load_rounds(table_of(plan), plan.topology, costs)[0]
    f, s = load.linear + load.of("F").compute, load.linear + load.of("S").compute
    lockstep = run_clock([load], plan.topology, costs, "layer").seconds
    assert lockstep == pytest.approx(f.max() + 3 * s.max())
    assert run_clock([load], plan.topology, costs, "node").seconds == pytest.approx(lockstep)
    free = run_clock([load], plan.topology, costs, "step").seconds
    slack = Costs(MODEL, lock.model_copy(update={"prefetch_layers": 2}))
    between = run_clock([load], plan.topology, slack, "layer").seconds
    assert free * (1 - 1e-9) <= between < lockstep


def test_lasp2h_gather_gives_the_last_rank_most_of_the_pairs() -> None:
    costs = Costs(MODEL, CLUSTER)
    plan = Plan((4,), (Round((Placement(0, 400, Block(0, 4), Block(0, 4), 0, "kv_gather"),)),))
    load = load_rounds(table_of(plan), plan.topology, costs)[0]
    quarters = np.diff(causal_pairs([0, 100, 200, 300, 400])) * costs.layers[0].attention_seconds("none")
    assert load.of("F").compute - load.of("F").compute[0] == pytest.approx(quarters - quarters[0])
    assert quarters[3] / quarters.sum() == pytest.approx(7 / 16, rel=0.005)


def test_gathered_keys_leave_work_where_the_queries_are() -> None:
    """Four documents of 100 tokens on four ranks: one each, so all do the same; no rank does 7/16 of the pairs."""
    costs = Costs(MODEL, CLUSTER)
    placements = tuple(Placement(i, 100, Block(0, 4), Block(0, 4), 0, "kv_gather") for i in range(4))
    load = load_rounds(table_of(Plan((4,), (Round(placements),))), Plan((4,), ()).topology, costs)[0]
    assert load.of("F").compute == pytest.approx(
        causal_pairs([100])[0] * costs.layers[0].attention_seconds("none") + 2e-6
    )


def test_states_of_a_linear_layer_cost_the_same_for_any_number_of_tokens() -> None:
    model = MODEL.model_copy(update={"pattern": "L"})
    costs = Costs(model, CLUSTER)
    sent = set()
    for tokens in (100, 10_000):
        plan = Plan((2, 2), (Round((Placement(0, tokens, Block(0, 4), Block(0, 4), 0),)),))
        (load,) = load_rounds(table_of(plan), plan.topology, costs)
        gathered = load.of("L").seconds - load.tokens * costs.layers[-1].token_seconds("none")
        sent.add((*np.round(gathered, 12).tolist(), *(int(x[0]) for x in load.sent["state_gather"])))
    (row,) = sent
    state = 4 * 7 * 16 * 16 * 2  # fp32, forward and backward
    assert row[-2:] == (4 * state, 4 * 2 * state)  # 4 layers; one rank on the same node, two on the other
    assert row[0] == pytest.approx(2 * state / CLUSTER.inter_rate + 2 * CLUSTER.inter_latency)


def hsap_and_ulysses(heads: int, kv_heads: int, length: int, inter_rate: float) -> list:
    model = MODEL.model_copy(update={"heads": heads, "kv_heads": kv_heads, "pattern": "F"})
    cluster = CLUSTER.model_copy(update={"launch_seconds": 0.0, "inter_latency": 0.0, "inter_rate": inter_rate})
    one = Placement(0, length, Block(0, 8), Block(0, 4), length - 1)
    plans_ = [Plan((4, 4), (Round((one._replace(attention=kind),)),)) for kind in ("hsap", "ulysses")]
    return [load_rounds(table_of(plan), plan.topology, Costs(model, cluster))[0] for plan in plans_]


def test_hsap_goes_beyond_the_head_count() -> None:
    """4 heads on 8 ranks: by heads, half of the ranks idle; over two nodes all of them work."""
    hsap, ulysses = hsap_and_ulysses(4, 4, 4000, inter_rate=1e12)
    assert np.count_nonzero(ulysses.of("F").compute) == 4
    assert hsap.of("F").compute.max() == pytest.approx(ulysses.of("F").compute.max() / 2, rel=2e-3)
    assert hsap.of("F").compute.sum() == pytest.approx(ulysses.of("F").compute.sum())


def test_keys_on_their_way_cost_only_what_attention_does_not_hide() -> None:
    quick, _ = hsap_and_ulysses(4, 4, 4000, inter_rate=1e12)
    slow, _ = hsap_and_ulysses(4, 4, 4000, inter_rate=1e6)
    costs = Costs(MODEL.model_copy(update={"heads": 4, "kv_heads": 4, "pattern": "F"}), CLUSTER)
    rows = 2828  # node 1 needs the tokens before the cut at 4000 / sqrt(2), of one KV head a rank
    assert quick.sent["kv_exchange"][1].sum() == 4 * 3 * rows * 2 * 4 * costs.head_bytes
    exposed = (slow.of("F").exchange - quick.of("F").exchange)[1]  # a rank of which no token crosses nodes
    hidden = quick.of("F").compute[1]
    assert exposed + hidden == pytest.approx(2 * rows * 2 * costs.head_bytes / 1e6, rel=2e-2)


def test_the_pinned_cluster_keeps_its_figures() -> None:
    cluster = load_cluster("h100-8x8")
    assert (cluster.nodes, cluster.ranks_per_node, cluster.peak_flops) == (8, 8, 989e12)
    assert (cluster.matmul_share, cluster.attention_share) == (0.55, 0.55)
    assert (cluster.intra_rate, cluster.inter_rate) == (280e9, 40e9)
    assert (cluster.intra_latency, cluster.inter_latency, cluster.launch_seconds) == (20e-6, 40e-6, 5e-6)
    assert (cluster.rank_tokens_max, cluster.round_seconds, cluster.sync) == (32_768, 0.0, "step")
