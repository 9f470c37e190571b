"""`raypack inspect`: the page says what the records say; comparison, plans and following, on runs in any state."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from click.testing import CliRunner, Result
from matplotlib.figure import Figure

from raypack.cli import main
from raypack.data.build import build_corpus
from raypack.data.corpus import Corpus
from raypack.data.splits import training_stream
from raypack.errors import RaypackError
from raypack.observe.collector import merge
from raypack.observe.record import StepRecord, ids_digest
from raypack.observe.run_files import plan_file, steps_of
from raypack.observe.steps import Tail, follow, read_steps
from raypack.plan.plan import Plan
from raypack.plan.plan_file import plan_from_json
from raypack.plan.topology import Topology
from raypack.planning.steps import StepPlanner
from raypack.report.console import line
from raypack.report.curves import CURVES
from raypack.report.page import write_page
from raypack.report.plots import columns
from raypack.report.sketches import SKETCHES, plots
from raypack.report.stored import run_config
from tests.inspect_cases import CONFIG, write_run
from tests.observe_cases import record, report


def inspect(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)])


class Text(HTMLParser):
    """Visible text of a page, and every address in it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.svgs = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.svgs += tag == "svg"
        found = [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.addresses += [value for value in found if not value.startswith("#")]
        assert tag != "script"

    def handle_data(self, data: str) -> None:
        self.words.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " ".join(word for word in self.words if word)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "two-attempts"
    write_run(folder)
    return folder


@pytest.fixture(scope="module")
def page(run_dir: Path) -> Text:
    target = run_dir.parent / "page.html"
    done = inspect(run_dir, "--html", target)
    assert done.exit_code == 0, done.output
    return Text(target.read_text(encoding="utf-8"))


def test_the_page_needs_nothing_but_itself(page: Text) -> None:
    assert [a for a in page.addresses if not a.startswith("data:")] == []
    assert "@import" not in page.text


def test_the_page_says_what_the_summary_says(page: Text, run_dir: Path) -> None:
    summary = json.loads(inspect(run_dir, "--json", "-").stdout)
    for wanted in (
        "raypack run two-attempts",
        f"{summary['steps']} (1 skipped, 10 replayed)",
        "8 then 4, 1 restarts",
        f"{summary['first_loss']:.4f} -> {summary['last_loss']:.4f}",
        "2,340.0 MB across",
        "nodes are simulated",
    ):
        assert wanted in page.text


def test_every_plot_is_there_with_its_axes_and_legends(page: Text) -> None:
    assert page.svgs == len(SKETCHES)
    for sketch in SKETCHES:
        assert f"{sketch.title}." in page.text
    for wanted in (
        "held-out", "replayed later", "plan_wait", "gradient_reduce", "MFU", "static plans", "sparse_in",
        "MB a step across nodes", "width (ranks)", "busy / mean", "plan / area bound", "full backward", "step",
        "ranks", "modelled",
    ):  # fmt: skip
        assert wanted in page.text, wanted


def test_the_page_lists_attempts_last_steps_and_the_configuration(page: Text) -> None:
    heads = "attempt steps of them counted ranks nodes seconds ended"
    assert re.search(heads + r" 0 0 to 39 30 8 2 [\d.]+ rank 3 died 1 30 to 59 30 4 1 ", page.text)
    assert "59 (attempt 1)" in page.text
    assert 'name = "two-attempts"' in page.text


def test_lines_are_the_records_values(run_dir: Path) -> None:
    records = read_steps(run_dir)
    kept = columns(records)
    assert kept.steps.tolist() == list(range(60))
    losses = kept.of(lambda r: r.loss)
    assert np.isnan(losses[20])
    assert losses[59] == [r.loss for r in records if r.effective][59]
    busy = kept.ranks(lambda r: r.rank_busy_seconds)
    assert busy.shape == (60, 8)
    assert np.isnan(busy[40, 4:]).all()
    thinned = columns(records, points=7)
    assert len(thinned.steps) == 7
    assert thinned.of(lambda r: r.seconds)[0] == pytest.approx(np.mean([r.seconds for r in kept.records[:9]]))
    assert np.nanmean(thinned.ranks(lambda r: r.rank_busy_seconds)[0]) == pytest.approx(busy[:9].mean())


def test_a_page_of_a_long_run_stays_small() -> None:
    made = plots([record(step) for step in range(5000)])
    assert sum(len(plot.svg) for plot in made) < 2_000_000


def test_ranks_of_a_large_world_are_drawn_by_their_spread() -> None:
    made = {plot.title: plot.svg for plot in plots([record(step, world=100).compact() for step in range(5)])}
    assert "95% of the ranks below" in made["Busy by rank"]
    assert "largest / mean" in made["Imbalance"]


def test_a_run_of_an_older_version_gives_a_page_without_what_it_lacks(tmp_path: Path) -> None:
    lines = [f'{{"step": {n}, "attempt": 0, "loss": {5 - n}.0, "sample_count": 3, "seconds": 1.0}}' for n in range(4)]
    (tmp_path / "steps.jsonl").write_text("\n".join(lines) + "\n")
    done = inspect(tmp_path, "--html", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    found = Text((tmp_path / "page.html").read_text())
    assert "5.0000 -> 2.0000" in found.text
    assert "Loss." in found.text
    assert "Block widths." not in found.text
    assert "Busy by rank." not in found.text


def test_a_run_without_a_step_gives_a_page_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text("")
    assert inspect(tmp_path, "--html", tmp_path / "page.html").exit_code == 0
    assert "No step is on record yet." in Text((tmp_path / "page.html").read_text()).text


def test_text_of_a_run_never_becomes_markup(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text(record(policy="<script>x</script>").to_json() + "\n")
    (tmp_path / "config.toml").write_text('x = "</pre><script>y</script>"\n')
    assert inspect(tmp_path, "--html", tmp_path / "page.html").exit_code == 0
    assert "<script>" in Text((tmp_path / "page.html").read_text()).text


def test_an_interrupted_run_and_one_that_is_being_written_are_read(tmp_path: Path) -> None:
    open_run = write_run(tmp_path / "r", finish="")
    with open(tmp_path / "r" / "steps.jsonl", "a") as file:
        file.write(record(60, attempt=1).to_json()[:50])
    done = inspect(tmp_path / "r", "--html", tmp_path / "page.html", "--json", "-")
    assert json.loads(done.stdout)["steps"] == 60
    assert "still running, or killed" in Text((tmp_path / "page.html").read_text()).text
    open_run.finish("interrupted")
    assert "interrupted" in inspect(tmp_path / "r").output


def test_two_runs_are_compared_by_figure_sample_and_setting(run_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_run(other, loss=5.5)
    changed = CONFIG.model_dump()
    changed["plan"]["policy"] = "static"
    (other / "config.toml").write_text(tomli_w.dumps(changed))
    data = json.loads(inspect(run_dir, "--compare", other, "--json", "-").stdout)
    assert data["names"] == ["two-attempts", "other"]
    assert data["figures"]["last loss"]["ratios"] == [1, pytest.approx(1.1)]
    assert data["figures"]["inter MB a step"]["ratios"] == [1, 1]
    assert data["figures"]["x static, modelled"]["values"] == [pytest.approx(1.3)] * 2
    assert (data["common_steps"], data["same_samples"]) == (60, 60)
    assert data["largest_loss_gap"][1] == pytest.approx(0.1)
    assert data["differing"] == {"plan.policy": ["joint", "static"]}
    text = inspect(run_dir, "--compare", other).output
    for wanted in ("B / A", "plan.policy", "1.1"):
        assert wanted in text
    assert inspect(run_dir, other).output == text


def test_any_number_of_runs_are_laid_over_each_other_and_no_name_is_cut(run_dir: Path, tmp_path: Path) -> None:
    names = [f"1f3s_local-20260301-10150{n}-{'a-name-of-its-own-' * 4}{n}" for n in range(11)]
    records = (run_dir / "steps.jsonl").read_text()
    for n, name in enumerate(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / "steps.jsonl").write_text(records if n else records[: records.index("\n") + 1])
    done = inspect(*(tmp_path / name for name in names))
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80
    folded = "".join(done.output.split())
    assert all(name in folded for name in names)
    assert all(f"{letter} / A" in done.output for letter in "BCDEFGHIJK")
    assert "steps that all have: 1," in done.output

    page, picture = tmp_path / "page.html", tmp_path / "curves.svg"
    assert inspect(*(tmp_path / name for name in names[:3]), "--html", page, "--picture", picture).exit_code == 0
    found = Text(page.read_text())
    assert all(name in found.text for name in names[:3])
    assert found.svgs == len(CURVES)
    drawn = picture.read_text()
    assert all(curve.title.replace("'", "&#x27;") in drawn or curve.title in drawn for curve in CURVES)


def test_runs_of_one_name_are_told_apart_by_their_directories(run_dir: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "two-attempts", steps=12)
    names = json.loads(inspect(run_dir, tmp_path / "two-attempts", "--json", "-").stdout)["names"]
    assert names == [f"two-attempts ({run_dir})", f"two-attempts ({tmp_path / 'two-attempts'})"]


def test_a_stack_of_phases_is_as_high_as_its_step() -> None:
    """Ranks that are slow in different phases: the maxima add up to 1.9 steps, the means to one."""
    one, two = {"forward": 0.9, "backward": 0.1}, {"forward": 0.1, "backward": 0.9}
    reports = [report(rank, phases=phases, seconds=1.0 + rank / 20) for rank, phases in enumerate((one, two))]
    made = merge(reports)
    assert sum(made.phase_seconds.values()) == pytest.approx(made.seconds)
    axis = Figure().subplots()
    (phases,) = [sketch for sketch in SKETCHES if sketch.title == "Step time by phase"]
    records = [made, made.model_copy(update={"step": 1})]
    assert phases.draw([axis], columns(records), records)
    tops = [each.get_datalim(axis.transData).y1 for each in axis.collections]
    assert max(tops) == pytest.approx(made.seconds)


def test_maxima_over_ranks_that_older_records_have_are_not_stacked(run_dir: Path) -> None:
    old = [record(step).model_copy(update={"version": 1, "phase_seconds": {"forward": 9.0}}) for step in range(3)]
    drawn = {plot.title: plot.svg for plot in plots(old)}
    assert "forward" not in drawn["Step time by phase"]


def test_a_run_writes_its_page_whatever_its_state_and_fails_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RaypackError, match=r"has no steps\.jsonl"):
        write_page(tmp_path)
    (tmp_path / "steps.jsonl").write_text(merge([report(1)]).to_json() + "\n")
    (tmp_path / "attempts.jsonl").write_bytes(b"\xff\xfe\n")
    assert write_page(tmp_path) == tmp_path / "page.html"
    assert "No step is on record yet." in Text((tmp_path / "page.html").read_text()).text
    monkeypatch.setattr("raypack.report.page.plots", lambda records: 1 / 0)
    with pytest.raises(RaypackError, match="cannot draw the page"):
        write_page(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"steps.jsonl", "attempts.jsonl", "page.html"}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    """A run whose records belong to a corpus that is there, and the plan of its step 2."""
    folder = tmp_path_factory.mktemp("planned")
    rng = np.random.default_rng(3)
    lines = [json.dumps({"text": "x" * int(n)}) for n in np.clip(rng.pareto(1.1, 300) * 60, 1, 3000)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    build_corpus([folder / "texts.jsonl"], folder / "corpus", holdout=0.1, progress=False)
    data = CONFIG.model_dump()
    data["data"].update(corpus=str(folder / "corpus"), max_sample_tokens=2048, tokens_per_step=8192)
    config = type(CONFIG).model_validate(data)
    corpus = Corpus.open(folder / "corpus")
    planner, state = StepPlanner(config, corpus), training_stream(corpus, config.data).start
    run = folder / "run"
    run.mkdir()
    (run / "config.toml").write_text(tomli_w.dumps(config.model_dump()))
    made = []
    for step in range(3):
        made.append(planner.plan(Topology((4, 4)), step, state).plan)
        state = made[-1].after
    records = [_record_of(plan) for plan in made]
    (run / "steps.jsonl").write_text("".join(each.to_json() + "\n" for each in records))
    return run, made[2]


def _record_of(plan: Plan) -> StepRecord:
    assert plan.before is not None
    samples = [p.sample for p in plan.placements]
    return record(
        plan.step, epoch=plan.before.epoch, first_sample=plan.before.next_sample, sample_count=len(samples), world=8,
        nodes=2, tokens=plan.tokens, sample_ids_digest=ids_digest(samples),
    )  # fmt: skip


def test_a_plan_that_was_not_kept_is_planned_again_from_the_corpus(planned: tuple[Path, Plan]) -> None:
    run, plan = planned
    done = inspect(run, "--step", 2, "--json", "-")
    assert plan_from_json(done.stdout) == plan
    table = inspect(run, "--step", 2).output
    assert "planned once more" in " ".join(table.split())
    longest = max(plan.placements, key=lambda p: p.length)
    assert f"{longest.length:,}" in table


def test_a_kept_plan_is_shown_as_it_was(planned: tuple[Path, Plan], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(planned[0], run)
    plan_file(run, 2).parent.mkdir()
    plan_file(run, 2).write_text(planned[1].to_json())
    config = run_config(run)
    gone = config.model_copy(update={"data": config.data.model_copy(update={"corpus": "/gone"})})
    (run / "config.toml").write_text(tomli_w.dumps(gone.model_dump()))
    done = inspect(run, "--step", 2, "--picture", tmp_path / "p.svg", "--html", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    assert "as it was kept" in " ".join(done.output.split())
    picture = (tmp_path / "p.svg").read_text()
    assert "full attention" in picture or "<path" in picture
    found = Text((tmp_path / "page.html").read_text())
    assert "Plan of step 2" in found.text
    assert "parent > child" in found.text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--step", 99), "step = 99"),
        (("nowhere", "--step", 1), "--step: goes with one RUN"),
        (("nowhere", "--follow"), "--follow: goes with one RUN"),
        (("--compare", "nowhere"), "nowhere"),
        (("--html", "/nowhere/page.html"), "/nowhere/page.html"),
        (("--step", 1), "config.toml"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path: Path, arguments: tuple[object, ...], says: str) -> None:
    (tmp_path / "steps.jsonl").write_text("".join(record(n).to_json() + "\n" for n in range(3)))
    done = inspect(tmp_path, *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_another_corpus_is_refused_rather_than_drawn(planned: tuple[Path, Plan], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(planned[0], run)
    changed = [line.model_copy(update={"sample_ids_digest": "0" * 16}) for line in read_steps(run)]
    (run / "steps.jsonl").write_text("".join(line.to_json() + "\n" for line in changed))
    done = inspect(run, "--step", 2)
    assert done.exit_code == 2
    assert "other samples" in done.stderr


def test_tail_gives_each_record_once_and_waits_for_whole_lines(tmp_path: Path) -> None:
    tail, path = Tail(tmp_path), tmp_path / "steps.jsonl"
    assert tail.new() == []
    first, second = record(0).to_json() + "\n", record(1).to_json() + "\n"
    path.write_text(first + second[:30])
    assert [r.step for r in tail.new()] == [0]
    assert tail.new() == []
    path.write_text(first + second)
    assert [r.step for r in tail.new()] == [1]


def test_follow_shows_what_comes_until_the_run_ends(tmp_path: Path) -> None:
    observer = write_run(tmp_path / "r", steps=12, finish="")
    seen: list[int] = []
    reached = threading.Event()

    def watch() -> None:
        for records in follow(tmp_path / "r", interval=0.01, quiet_max=60):
            seen.extend(r.step for r in records)
            reached.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert reached.wait(60)
    observer.finish("finished")
    watcher.join(60)
    assert not watcher.is_alive()
    assert seen == [*range(12), *range(2, 32)]
    assert "does not run any more" in " ".join(inspect(tmp_path / "r", "--follow").output.split())


def test_follow_needs_no_settings(tmp_path: Path) -> None:
    assert steps_of(tmp_path) == 0
    (tmp_path / "config.toml").write_text("[run]\nsteps = 70\nan_older_key = 1\n")
    assert steps_of(tmp_path) == 70
    assert line(record(3), 0).startswith("step 3  loss")
    assert line(record(3), 70).startswith("step 3 (4 of 70)  loss")


def test_follow_gives_up_on_a_run_that_was_killed(tmp_path: Path) -> None:
    write_run(tmp_path / "r", steps=12, finish="")
    assert sum(len(records) for records in follow(tmp_path / "r", interval=0.01, quiet_max=0.1)) == 42


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium installed")
def test_chromium_draws_the_page(run_dir: Path, tmp_path: Path) -> None:
    from matplotlib.image import imread

    target = tmp_path / "page.html"
    assert inspect(run_dir, "--html", target).exit_code == 0
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking",
        "--disable-component-update --disable-sync --hide-scrollbars --window-size=1280,3200",
    )
    picture = tmp_path / "page.png"
    done = subprocess.run(
        ["chromium", *" ".join(flags).split(), f"--user-data-dir={tmp_path}/profile", f"--screenshot={picture}",
         target.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]
    pixels = imread(picture)[..., :3]
    rows_with_ink = (np.abs(pixels - 1).max(axis=2) > 0.2).any(axis=1)
    assert pixels.shape[:2] == (3200, 1280)
    assert rows_with_ink[:3000].mean() > 0.5, "the page is mostly blank"
    # The plots' own colours: matplotlib's first four.
    for colour in ((0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E), (0x2C, 0xA0, 0x2C)):
        assert (np.abs(pixels * 255 - np.array(colour)).max(axis=2) < 3).sum() > 500, colour
