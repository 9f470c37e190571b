"""Timelines agree with `evaluate`; pictures are whole files or none, the same bytes each time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from raypack.cli import main
from raypack.config import ClusterConfig, ModelConfig
from raypack.errors import RaypackError
from raypack.plan.plan import Placement, Plan, Round
from raypack.plan.samples import Samples
from raypack.plan.topology import Block, Topology
from raypack.planning.evaluate import evaluate
from raypack.planning.policies import make_plan
from raypack.report.pictures import draw_plans
from raypack.report.timeline import CHEAP, EXCHANGE, FULL, NO_SAMPLE, Timeline, timeline
from raypack.simulate.policy_chart import MARKERS, draw_means, draw_steps
from tests.planning_cases import CLUSTER, MODEL, lengths, models, plans

SYNCS = ["step", "layer", "node"]


def busy(line: Timeline) -> np.ndarray:
    return np.bincount(line.rank, line.duration, line.topology.world)


@given(plans(), models(), st.sampled_from(SYNCS), st.integers(0, 3))
def test_a_timeline_ends_and_works_as_evaluate_says(plan: Plan, model: ModelConfig, sync: str, prefetch: int) -> None:
    cluster = CLUSTER.model_copy(update={"prefetch_layers": prefetch, "rank_tokens_max": 100_000})
    line, figures = timeline(plan, cluster, model, sync), evaluate(plan, cluster, model, sync)
    assert line.seconds == pytest.approx(figures.seconds, rel=1e-9)
    assert busy(line) == pytest.approx(figures.rank_busy, rel=1e-9, abs=1e-15)


@given(plans(), models(), st.sampled_from(SYNCS))
def test_parts_of_a_rank_never_overlap_and_stay_inside_the_step(plan: Plan, model: ModelConfig, sync: str) -> None:
    line = timeline(plan, CLUSTER.model_copy(update={"rank_tokens_max": 100_000}), model, sync)
    order = np.lexsort((line.start, line.rank))
    rank, start, end = line.rank[order], line.start[order], (line.start + line.duration)[order]
    slack = 1e-9 * line.seconds
    same = rank[1:] == rank[:-1]
    assert np.all(start[1:][same] >= end[:-1][same] - slack)
    assert np.all(end <= line.seconds + slack)
    assert np.all(line.start >= 0)
    assert np.all(np.diff(line.round_ends, axis=0) >= -slack)


@given(plans(), models())
def test_a_sample_is_drawn_on_its_parent_and_on_its_child(plan: Plan, model: ModelConfig) -> None:
    line = timeline(plan, CLUSTER.model_copy(update={"rank_tokens_max": 100_000}), model)
    assert np.array_equal(line.kind == EXCHANGE, line.sample == NO_SAMPLE)
    for p in plan.placements:
        mine = line.sample == p.sample
        cheap = set(line.rank[mine & (line.kind == CHEAP)].tolist())
        full = set(line.rank[mine & (line.kind == FULL)].tolist())
        assert cheap == set(range(p.child.first, p.child.end))
        if "F" in model.kinds:
            assert full == set(range(p.parent.first, p.parent.end))
        assert set(line.length[mine].tolist()) <= {p.length}


def test_full_attention_is_shared_by_pairs_and_the_rest_by_tokens() -> None:
    free = ClusterConfig(launch_seconds=0, intra_latency=0, inter_latency=0, round_seconds=0)
    placements = tuple(Placement(i, n, Block(0, 1), Block(0, 1), n - 1) for i, n in enumerate((300, 100)))
    line = timeline(Plan((1,), (Round(placements),)), free, MODEL)
    full, cheap = line.duration[line.kind == FULL], line.duration[line.kind == CHEAP]
    assert full[0] / full[1] == pytest.approx((300 * 301) / (100 * 101))
    assert cheap[0] / cheap[1] == pytest.approx(3)


def test_waiting_of_a_pack_stands_between_its_full_and_cheap_parts() -> None:
    """`step`: ranks of a pack meet at the full layers, so cheap parts of one pack start together."""
    parent = Block(0, 2)
    placements = (
        Placement(0, 400, parent, Block(0, 1), 399),
        Placement(1, 100, parent, Block(1, 1), 99),
        Placement(2, 900, Block(1, 1), Block(1, 1), 899),
    )
    line = timeline(Plan((2,), (Round(placements),)), CLUSTER, MODEL, "step")
    starts = [line.start[(line.rank == rank) & (line.kind == CHEAP)].min() for rank in (0, 1)]
    assert starts[0] == pytest.approx(starts[1])
    full_ends = [(line.start + line.duration)[(line.rank == r) & (line.kind == FULL)].max() for r in (0, 1)]
    assert full_ends[1] == pytest.approx(starts[1], rel=1e-6)
    assert full_ends[0] < starts[0]


def some_plan(nodes: tuple[int, ...] = (4, 4)) -> Plan:
    samples = Samples.of_lengths(lengths(9, 30, 4000))
    return make_plan(samples, Topology(nodes), CLUSTER, MODEL, "joint", budget=0)


@pytest.mark.parametrize(("suffix", "nodes"), [(".png", (1,)), (".png", (3, 2)), (".svg", (4, 4)), (".pdf", (4, 4))])
def test_a_picture_is_a_whole_file_with_the_same_bytes_each_time(tmp_path: Path, suffix: str, nodes) -> None:
    one, two = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    for path in (one, two):
        draw_plans([some_plan(nodes)], CLUSTER, MODEL, path)
    assert {".png": b"\x89PNG\r\n\x1a\n", ".svg": b"<svg", ".pdf": b"%PDF-"}[suffix] in one.read_bytes()
    assert one.read_bytes() == two.read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {one.name, two.name}, "nothing half-written is left"


def test_a_picture_shows_its_samples_in_colours_of_their_own(tmp_path: Path) -> None:
    from matplotlib.image import imread

    placements = tuple(Placement(i, 2000, Block(i, 1), Block(i, 1), 1999) for i in range(4))
    plan = Plan((2, 2), (Round(placements),))
    draw_plans([plan], CLUSTER, MODEL, tmp_path / "p.png")
    pixels = (imread(tmp_path / "p.png")[..., :3] * 255).round().astype(int).reshape(-1, 3)
    colours, counts = np.unique(pixels, axis=0, return_counts=True)
    vivid = colours[(counts > 2000) & (np.ptp(colours, axis=1) > 40)]
    assert len(vivid) == 8, "a dark and a light tone of each of four samples"


def test_many_rectangles_do_not_become_many_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypack.report.pictures.VECTORS_MAX", 10)
    draw_plans([some_plan()], CLUSTER, MODEL, tmp_path / "p.svg")
    assert "<image" in (tmp_path / "p.svg").read_text()


def test_bad_targets_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "dir.png").mkdir()
    for name in ("p.jpg", "p", "none/p.png", "dir.png"):
        with pytest.raises(RaypackError, match=r"pdf|folder|directory"):
            draw_plans([some_plan()], CLUSTER, MODEL, tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["dir.png"]


def test_more_ranks_than_a_picture_shows_are_refused() -> None:
    plan = Plan((8,) * 200, (Round((Placement(0, 50, Block(0, 1), Block(0, 1), 49),)),))
    with pytest.raises(RaypackError, match="1600 ranks, over the 1024"):
        draw_plans([plan], CLUSTER, MODEL, "x.png")


def test_plan_evaluate_and_simulate_draw(tmp_path: Path) -> None:
    (tmp_path / "n.txt").write_text("\n".join(map(str, lengths(4, 40, 9000))))
    calls = [
        ["plan", "--lengths", tmp_path / "n.txt", "--ranks", 8, "--out", tmp_path / "p.json", "--budget", 0],
        ["evaluate", tmp_path / "p.json", "--sync", "layer"],
        ["simulate", "--lengths", tmp_path / "n.txt", "--ranks", 8, "--policies", "static,dynamic", "--budget", 0],
    ]
    calls[2] += ["--steps", 2, "--tokens-per-step", 30_000]
    calls.append([*calls[2], "--picture-step", 1])
    for number, call in enumerate(calls):
        picture = tmp_path / f"{number}.png"
        done = CliRunner().invoke(main, [str(a) for a in (*call, "--picture", picture)])
        assert done.exit_code == 0, done.output
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "p.json").read_text())["policy"] == "joint"


@pytest.mark.parametrize("seconds", [(1.0, 1.05, 3.0), (1.0, 1.0, 1.0)])
def test_the_chart_of_a_simulation_shows_a_difference_of_5_percent_beside_one_of_200(seconds: tuple) -> None:
    """How far markers lie apart on the picture, as a share of its axis; policies that coincide stand side by side."""
    names = ["joint", "dynamic", "static"]
    bound = np.full(4, 0.95)
    figure = Figure()
    left, right = figure.subplots(1, 2)
    every = np.array([[each] * 4 for each in seconds])
    draw_means(left, names, every, 0.95)
    draw_steps(right, names, every, bound)
    figure.draw_without_rendering()
    marks = [line for line in left.get_lines() if line.get_marker() in MARKERS]
    onto_axis = left.transAxes.inverted()
    across = [onto_axis.transform(line.get_transform().transform(line.get_xydata()))[0, 0] for line in marks]
    assert " 1 s, the best; 95th percentile 1 s" in [text.get_text() for text in left.texts]
    assert across[1] - across[0] > (0.1 if seconds[1] > 1 else -1e-9)
    assert across[2] <= 1
    points = [line.get_xydata()[0, 0] for line in right.get_lines() if line.get_label() in names]
    assert len(set(points)) == 3
