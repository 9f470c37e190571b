"""`raypack calibrate`: known lines are recovered, real ranks give a file that plans, failures are one line."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from raypack.calibrate.fit import Series, fit_line
from raypack.calibrate.result import PEAKS, Measurements, Wanted, calibrate, rough, to_toml
from raypack.cli import main
from raypack.config import load_cluster
from raypack.errors import RaypackError
from raypack.plan.plan import check_plan
from raypack.plan.topology import Topology

AMOUNTS = (1e4, 1e5, 1e6, 1e7)


def line(fixed: float, rate: float, amounts: tuple[float, ...] = AMOUNTS) -> Series:
    return Series(amounts, tuple(fixed + amount / rate for amount in amounts))


FOUND = Measurements(
    nodes=(4, 4),
    device="NVIDIA H200",
    backend="nccl",
    kernel="flash_attn",
    launch_seconds=7e-6,
    matmul=line(1e-5, 600e12, (1e9, 1e11, 1e12)),
    attention=line(2e-5, 400e12, (1e9, 1e11, 1e12)),
    intra=line(20e-6, 300e9),
    inter=line(45e-6, 38e9),
)


@given(st.floats(0, 1e-2), st.floats(1e6, 1e13))
def test_a_line_is_recovered_from_its_points(fixed: float, rate: float) -> None:
    fit = fit_line(line(fixed, rate), "x")
    assert fit.rate == pytest.approx(rate, rel=1e-5)
    assert fit.fixed == pytest.approx(fixed, rel=1e-5, abs=1e-6 * AMOUNTS[-1] / rate)
    assert fit.r_squared == pytest.approx(1)
    assert fit.worst < 1e-6
    assert fit.points == 4


def test_small_amounts_fix_the_latency_whatever_the_noise_of_large_ones() -> None:
    points = line(50e-6, 1e9)
    noisy = Series(points.amounts, (*points.seconds[:-1], points.seconds[-1] * 1.05))
    assert fit_line(noisy, "x").fixed == pytest.approx(50e-6, rel=0.05)


def test_a_line_never_starts_below_zero_and_says_how_far_off_it_is() -> None:
    fit = fit_line(Series((1.0, 2.0, 3.0), (1.0, 3.0, 5.0)), "x")
    assert fit.fixed == 0
    assert 0 < fit.worst < 1
    assert fit.r_squared < 1


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 10)), min_size=2, max_size=8))
def test_any_measured_points_give_a_usable_line_or_are_refused(points: list[tuple[float, float]]) -> None:
    amounts, seconds = zip(*points, strict=True)
    try:
        fit = fit_line(Series(amounts, seconds), "intra")
    except RaypackError:
        return
    assert fit.fixed >= 0
    assert fit.rate > 0
    assert np.isfinite([fit.fixed, fit.rate, fit.r_squared, fit.worst]).all()


@pytest.mark.parametrize(
    ("series", "words"),
    [
        (Series((1.0,), (1.0,)), "two or more different amounts"),
        (Series((2.0, 2.0), (1.0, 1.1)), "two or more different amounts"),
        (Series((1.0, 2.0), (1.0, 0.0)), "times must be positive"),
        (Series((1.0, 1e6), (1.0, 0.1)), "no growth to fit"),
    ],
)
def test_points_that_are_no_line_are_refused_by_name(series: Series, words: str) -> None:
    with pytest.raises(RaypackError, match=words) as caught:
        fit_line(series, "inter")
    assert str(caught.value).startswith("inter: ")


def test_the_cluster_file_holds_what_was_measured_and_reads_back(tmp_path: Path) -> None:
    made = calibrate(FOUND)
    file = tmp_path / "mine.toml"
    file.write_text(to_toml(made))
    cluster = load_cluster(str(file))
    assert cluster == made.cluster
    assert (cluster.nodes, cluster.ranks_per_node) == (2, 4)
    assert cluster.peak_flops == PEAKS["NVIDIA H200"]
    assert cluster.peak_flops * cluster.matmul_share == pytest.approx(600e12, rel=1e-4)
    assert cluster.peak_flops * cluster.attention_share == pytest.approx(400e12, rel=1e-4)
    assert (cluster.intra_rate, cluster.inter_rate) == pytest.approx((300e9, 38e9), rel=1e-4)
    assert (cluster.intra_latency, cluster.inter_latency) == pytest.approx((20e-6, 45e-6), rel=1e-3)
    assert cluster.launch_seconds == 7e-6
    assert "measured" in cluster.source
    assert "R^2 1.0000" in file.read_text()
    assert "not measured" in file.read_text()


def test_without_a_data_sheet_the_peak_is_the_best_rate_measured() -> None:
    cluster = calibrate(replace(FOUND, device="CPU")).cluster
    assert cluster.peak_flops == pytest.approx(600e12, rel=1e-4)
    assert cluster.matmul_share == 1
    assert "MFU is relative" in cluster.source
    assert calibrate(replace(FOUND, device="CPU"), peak_flops=1e15).cluster.matmul_share == pytest.approx(0.6, rel=1e-4)
    with pytest.raises(RaypackError, match="below the 6e\\+14 FLOP/s measured"):
        calibrate(FOUND, peak_flops=1e12)


def test_what_cannot_be_measured_is_said() -> None:
    one_node = calibrate(replace(FOUND, nodes=(8,), inter=None))
    assert one_node.cluster.inter_rate == one_node.cluster.intra_rate
    assert any("one node" in text for text in one_node.unmeasured)
    narrow = calibrate(replace(FOUND, nodes=(1, 1), intra=None))
    assert narrow.cluster.intra_rate == narrow.cluster.inter_rate
    assert any("one rank a node" in text for text in narrow.unmeasured)
    alone = calibrate(replace(FOUND, nodes=(1,), intra=None, inter=None))
    assert any("defaults of raypack" in text for text in alone.unmeasured)
    with pytest.raises(RaypackError, match="equal size"):
        calibrate(replace(FOUND, nodes=(4, 3)))


def test_seconds_of_a_round_come_from_the_model_that_was_given() -> None:
    made = calibrate(replace(FOUND, rounds=Series((1.0, 2.0, 4.0), (0.112, 0.124, 0.148)), model="tiny"))
    assert made.cluster.round_seconds == pytest.approx(0.012, rel=1e-4)
    assert made.fits["rounds"].fixed == pytest.approx(0.1, rel=1e-4)
    assert "round_seconds: tiny" in made.cluster.source
    assert not any("round_seconds" in text for text in made.unmeasured)
    assert any("round_seconds" in text for text in calibrate(FOUND).unmeasured)


def test_the_plan_that_measures_rounds_has_one_short_sample_a_rank_and_round() -> None:
    pytest.importorskip("torch")
    from raypack.calibrate.measure import empty_plan

    plan = empty_plan((2, 1), 4)
    check_plan(plan)
    assert len(plan.rounds) == 4
    for each in plan.rounds:
        assert [(p.parent.first, p.child.width, p.length) for p in each.placements] == [(0, 1, 2), (1, 1, 2), (2, 1, 2)]


def test_points_far_from_their_line_are_called_rough() -> None:
    assert rough(calibrate(FOUND)) == []
    jumpy = Series(AMOUNTS, (1e-3, 1e-3, 9e-3, 1e-2))
    assert rough(calibrate(replace(FOUND, inter=jumpy)))[0].startswith("inter: rough")


def invoke(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["calibrate", *(str(a) for a in arguments)])
    assert result.exit_code == code, result.output
    return result.output if code == 0 else result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "x.json"], "give a name in .toml"),
        (["--out", "nowhere/x.toml"], "there is no folder"),
        (["--out", "x.toml", "--ranks", 0], "ranks = 0: must be at least 1"),
        (["--out", "x.toml", "--nodes", "4,x"], "nodes = '4,x'"),
        (["--out", "x.toml", "--nodes", "4,3"], "equal size"),
        (["--out", "x.toml", "--nodes", "2,2", "--ranks", 8], "add up to 4, not to ranks = 8"),
        (["--out", "x.toml", "--repeats", 0], "repeats = 0"),
        (["--out", "x.toml", "--timeout", -1], "timeout = -1"),
        (["--out", "x.toml", "--peak-flops", 0], "peak-flops = 0"),
        (["--out", "x.toml", "--model", "gpt"], "no model preset 'gpt'"),
        (["--out", "x.toml", "--ray", "auto", "--device", "cpu"], "give --ranks"),
        (["--out", "x.toml", "--ray", "auto", "--ranks", 2], "say --device"),
    ],
)
def test_bad_requests_get_one_line(arguments: list, words: str) -> None:
    error = invoke(*arguments, code=2)
    assert words in error
    assert len(error.strip().splitlines()) == 1


def test_cuda_without_a_gpu_is_one_line() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert "torch sees no GPU" in invoke("--out", "x.toml", "--device", "cuda", code=2)


@pytest.fixture
def no_process_left():
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.pool
@pytest.mark.usefixtures("no_process_left")
def test_real_ranks_give_a_file_that_plans(tmp_path: Path) -> None:
    file, out = tmp_path / "here.toml", tmp_path / "fits.json"
    (tmp_path / "model.toml").write_text("layers = 2\nwidth = 32\n")
    table = invoke(
        "--nodes", "1,1", "--out", file, "--repeats", 1, "--json", out, "--model", tmp_path / "model.toml"
    )  # fmt: skip
    assert "inter" in table
    data = json.loads(out.read_text())
    assert set(data["fits"]) == {"matmul", "attention", "inter", "rounds"}
    assert 1e-4 < data["cluster"]["round_seconds"] < 1
    written = tomllib.loads(file.read_text())
    assert written == {**data["cluster"], "name": "here"}
    assert (written["nodes"], written["ranks_per_node"]) == (2, 1)
    assert 1e8 < written["peak_flops"] < 1e13, "a CPU rank"
    assert 1e6 < written["inter_rate"] < 1e11
    (tmp_path / "n.txt").write_text("500\n300\n40\n")
    done = CliRunner().invoke(main, ["plan", "--lengths", str(tmp_path / "n.txt"), "--cluster", str(file)])
    assert done.exit_code == 0, done.output


@pytest.mark.pool
@pytest.mark.usefixtures("no_process_left")
def test_ranks_that_hang_end_with_the_time_out_and_leave_no_file(tmp_path: Path) -> None:
    error = invoke("--ranks", 2, "--out", tmp_path / "x.toml", "--timeout", 0.2, code=2)
    assert "waited timeout = 0.2 s for ranks [0, 1]" in error
    assert len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.pool
@pytest.mark.usefixtures("no_process_left")
def test_a_rank_that_fails_says_why() -> None:
    from raypack.calibrate.ranks import spawn_ranks

    with pytest.raises(RaypackError, match=r"rank 0 failed: .*quantum"):
        spawn_ranks(Topology((1,)), "quantum", Wanted(1, 60.0))


def all_figures(rank: int, world: int) -> dict:
    import torch

    from raypack.calibrate.measure import Sizes, measure

    tiny = Sizes((16, 32), (8, 16), 2, 8, (1000, 4000), torch.float32)
    with pytest.raises(RaypackError, match="equal"):
        measure(Topology((4, 2)), rank, torch.device("cpu"), Wanted(1, 60.0), tiny)
    found = measure(Topology((3, 3)), rank, torch.device("cpu"), Wanted(1, 60.0), tiny)
    return {"matmul": found.matmul, "intra": found.intra, "inter": found.inter}


@pytest.mark.pool
def test_every_rank_measures_the_same_seconds(pool) -> None:
    results = pool.run(6, all_figures)
    assert all(r == results[0] for r in results), "the slowest rank's seconds are everybody's"
    assert results[0]["intra"].amounts == (1000.0, 4000.0), "two others of the node, equal parts"
    assert results[0]["inter"].amounts == (999.0, 3999.0), "three ranks of the other node, equal parts"
    assert min(results[0]["matmul"].seconds) > 0


def test_the_first_failure_is_the_one_that_is_told() -> None:
    """A rank that fails takes its peers down with it: theirs are not the cause."""
    from raypack.calibrate.ranks import Failure, _collect

    pipes = []
    for at, text in ((2.0, "rank 0 failed: connection closed by peer"), (1.0, "rank 1 failed: out of memory")):
        here, there = multiprocessing.Pipe(duplex=False)
        there.send(Failure(at, text))
        pipes.append(here)
    with pytest.raises(RaypackError, match="rank 1 failed: out of memory"):
        _collect(pipes, 5.0)


@pytest.mark.ray
@pytest.mark.slow
def test_ray_starts_the_ranks_too(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    out = tmp_path / "r.toml"
    invoke("--ray", "local", "--ranks", 2, "--device", "cpu", "--out", out, "--repeats", 1)
    cluster = load_cluster(str(out))
    assert (cluster.nodes, cluster.ranks_per_node) == (1, 2)
    assert "2 ranks on 1 nodes, CPU, gloo" in cluster.source


@pytest.mark.slow
def test_torchrun_starts_the_ranks_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "raypack.cli", "calibrate", "--out", str(tmp_path / "t.toml"), "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to") == 1, "rank 0 alone speaks"
    cluster = load_cluster(str(tmp_path / "t.toml"))
    assert (cluster.nodes, cluster.ranks_per_node) == (1, 2)
