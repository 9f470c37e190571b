"""What a person sees of a run: phases, the live table, lines where there is no terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from raypack.observe.attempts import AttemptLog
from raypack.observe.record import StepRecord
from raypack.observe.reporter import Pulse
from raypack.report import follow
from raypack.report.console import COLUMNS, cells, duration, fitting, line, time_left
from raypack.report.follow import Follower, doing
from raypack.report.view import LEGEND, RunView
from raypack.training.progress import Progress
from tests.observe_cases import record

WIDE = {"parent_widths": {8: 30, 4: 10, 1: 200}, "tokens": 500_000, "plan_step_seconds": 2.0}
START = (("places", 0.1), ("groups", 0.2), ("model", 0.5), ("plan_wait", 0.4))


def terminal(width: int, height: int = 40) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def last_picture(console: Console) -> list[str]:
    """Lines of what the terminal shows of the live part at the end, without control codes."""
    drawn = re.split(r"\x1b\[2K", text_of(console))[-1]
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", drawn).splitlines()]


def test_without_a_terminal_each_phase_and_each_step_is_one_line() -> None:
    plain = Console(file=io.StringIO(), width=60)
    with RunView(plain, steps=3) as view:
        with view.phase("Ray", "starts") as said:
            said.append("a line that is longer than the console is wide, with the address of a dashboard")
        view.show([record(0), record(1, heldout_loss=2.25), record(2, complete=False)])
    lines = text_of(plain).splitlines()
    assert re.fullmatch(r"Ray +0\.0 s  a line that is .* dashboard", lines[0])
    assert lines[1] == LEGEND
    assert lines[2].startswith("step 0 (1 of 3)  loss 2.5000")
    assert "held-out 2.2500" in lines[3]
    assert lines[4].endswith("incomplete")
    assert len(lines) == 5
    assert "\x1b" not in text_of(plain)


def test_a_line_shows_what_the_step_was_and_what_its_plan_was_worth() -> None:
    changes: dict[str, Any] = {
        "loss": 1.25, "tokens": 1000, "seconds": 0.5, "mfu": 0.321, "plan_step_seconds": 0.4,
        "static_step_seconds": 0.6, "dynamic_step_seconds": 0.5,
        "bytes": {"full_in": {"intra": 2_500_000, "inter": 1_200_000}},
    }  # fmt: skip
    shown = line(record(7, **changes), 60, "ETA 26 s")
    for part in (
        "step 7 (8 of 60)", "loss 1.2500", "tokens/s 2,000", "MFU 32.1 %", "planned s 0.40", "measured s 0.50",
        "x static 1.50", "x dynamic 1.25", "parents 2:1 1:1", "children 1:2", "inter MB 1.2", "ETA 26 s",
    ):  # fmt: skip
        assert part in shown
    assert "x static -" in line(record(7, **changes | {"static_step_seconds": None}), 60)


@pytest.mark.parametrize("width", [50, 80, 100, 160])
def test_a_narrow_terminal_drops_columns_rather_than_cutting_figures(width: int) -> None:
    console = terminal(width)
    with RunView(console, steps=9) as view:
        view.show([record(step, **WIDE, heldout_loss=2.25 if step == 1 else None) for step in range(3)])
    picture = last_picture(console)
    heads = [head for head in COLUMNS if head in picture[0]]
    assert max(map(len, picture)) <= width
    assert "…" not in "".join(picture)
    assert {"step", "loss", "measured s", "x static", "x dynamic"} <= set(heads)
    assert ("held-out" in heads) == (width >= 100)
    assert ("parents" in heads) == (width >= 80)
    assert "3 of 9 steps" in " ".join(picture)


def test_what_does_not_fit_leaves_its_room_to_what_matters_less() -> None:
    sizes = dict.fromkeys(COLUMNS, 10) | {"parents": 60}
    assert fitting(sizes, 10) == ["step"]
    assert fitting(sizes, 82) == ["step", "loss", "tokens/s", "measured s", "x static", "x dynamic", "children"]
    assert fitting(sizes, 300) == list(COLUMNS)
    assert set(cells(record())) == set(COLUMNS)


def test_columns_stay_while_rows_without_a_figure_for_them_come() -> None:
    console = terminal(160)
    with RunView(console, steps=40, rows=2) as view:
        view.show([record(0, heldout_loss=2.25)])
        view.show([record(step) for step in range(1, 5)])
    picture = last_picture(console)
    assert "held-out" in picture[0]
    assert [row.split()[0] for row in picture[1:3]] == ["3", "4"]


def test_the_time_left_goes_by_the_clock() -> None:
    console = Console(file=io.StringIO(), width=300)
    with RunView(console, steps=4) as view:
        view.show([record(step, seconds=2.0, time=100.0 + 40 * step) for step in range(4)])
    shown = text_of(console).splitlines()
    assert ["ETA 6.0 s" in shown[1], "ETA 1 min 20 s" in shown[2], "ETA" in shown[4]] == [True, True, False]
    assert [time_left(80.0), time_left(0.0), time_left(None)] == ["ETA 1 min 20 s", "", ""]
    assert [duration(s) for s in (0.04, 9.96, 59.7, 3599.0, 7500.0, 90_000.0)] == [
        "0.0 s", "10 s", "1 min 00 s", "59 min 59 s", "2 h 05 min", "1 d 1 h",
    ]  # fmt: skip


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_the_terminal_is_right_after_whatever_ended_a_phase(error: type[BaseException] | None) -> None:
    console = terminal(80)

    def start() -> None:
        with RunView(console, steps=3) as view, view.phase("Ray", "starts"):
            if error:
                raise error

    if error:
        with pytest.raises(error):
            start()
    else:
        start()
    shown = text_of(console)
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is there again"
    assert last_picture(console) == []
    assert bool(re.search(r"Ray +0\.0 s", shown)) == (error is None), "only a phase that was done has a line"


def test_what_is_copied_is_not_broken_and_what_is_read_is_broken_between_words() -> None:
    console = terminal(40)
    view = RunView(console, steps=3)
    view.say("word " * 20, indent=8)
    view.say("python jobs/train_1f3s.py " * 3)
    *read, copied = text_of(console).splitlines()
    assert max(map(len, read)) <= 40
    assert all(each.startswith(" " * 8 + "word") for each in read[1:])
    assert copied == "python jobs/train_1f3s.py " * 3


def test_phases_of_the_start_are_kept_until_the_first_plan_is_there() -> None:
    progress = Progress(attempt=2)
    for phase in ("groups", "model"):
        progress.enter(phase)
    assert (progress.pulse().phase, progress.pulse().step) == ("model", -1)
    progress.enter("plan_wait", 5)
    assert [phase for phase, _ in progress.pulse().start] == ["start", "groups", "model"]
    for step in (5, 6):
        for phase in ("plan_wait", "forward", "backward"):
            progress.enter(phase, step if phase == "plan_wait" else None)
    pulse = progress.pulse()
    assert [phase for phase, _ in pulse.start] == ["start", "groups", "model", "plan_wait"]
    assert (pulse.attempt, pulse.step, pulse.phase, pulse.over) == (2, 6, "backward", False)
    assert 0 <= pulse.seconds < 60


def test_the_spinner_says_the_phase_and_runs_no_clock_of_a_step_that_is_over() -> None:
    def at(step: int, phase: str, **more: Any) -> Pulse:
        fields: dict[str, Any] = {"inside": "", "start": START, "over": False, "seconds": 3.0} | more
        return Pulse(attempt=0, step=step, phase=phase, **fields)

    assert doing(at(-1, "model", start=START[:2]), 0.5, -1) == ("model", 3.5)
    assert doing(at(0, "plan_wait", start=START[:3]), 0.5, -1) == ("first plan", 3.5)
    assert doing(at(7, "gradient_reduce"), 0.5, 6) == ("step 7: gradient reduce", 3.5)
    assert doing(at(7, "forward", inside="full_in"), 0.5, 6) == ("step 7: forward, waits in full_in", 3.5)
    assert doing(at(7, "forward", seconds=0.2), 0.5, 6) == ("step 7: forward", None)
    assert doing(at(7, "forward"), 0.5, 7) == ("step 8", None)
    assert doing(at(8, "checkpoint", over=True), 0.5, 7) == ("the ranks have ended", None)


class Acted:
    """An observer's actor, as far as the follower knows it: what each poll finds is put here."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.beat: tuple[Pulse, float] | None = None
        self.since = SimpleNamespace(remote=lambda count: (len(self.records), self.records[count:]))
        self.pulse = SimpleNamespace(remote=lambda: self.beat)


class Overheard(RunView):
    """Keeps what the spinner says."""

    says = ""

    def doing(self, text: str, seconds: float | None = None) -> None:
        self.says = text


def test_the_follower_tells_each_phase_of_each_start_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow.ray, "get", lambda asked, timeout: asked)
    observer, plain, up = Acted(), Console(file=io.StringIO(), width=200), [1]
    view = Overheard(plain, 9)
    follower = Follower(observer, view, tmp_path, attempt=3, workers=2, alive=lambda: up[0])

    def poll(attempt: int | None = None, phases: int = 0, step: int = -1) -> list[str]:
        """What the next poll prints, cut before the seconds."""
        before = len(text_of(plain))
        if attempt is not None:
            observer.beat = Pulse(attempt, step, 0.1, "forward", "", START[:phases], over=False), 0.1
        follower._poll()
        return [re.split(r" {2,}", each)[0] for each in text_of(plain)[before:].splitlines()]

    assert poll() == []
    assert view.says == "workers: 1 of 2 up"
    up[0] = 2
    assert poll() == ["workers"]
    assert poll(attempt=2, phases=4) == [], "of another group"
    assert poll(attempt=3, phases=2) == ["process group", "places", "groups"]
    observer.records = [record(0, attempt=3)]
    assert poll(attempt=3, phases=4, step=0)[:2] == ["model", "first plan"], "the start comes before the first step"
    observer.records += [record(step, attempt=3) for step in (1, 2)]
    assert poll(attempt=3, phases=4, step=3) == ["step 1 (attempt 3) (2 of 9)", "step 2 (attempt 3) (3 of 9)"]
    observer.beat, up[0] = None, 0
    assert poll() == []
    assert view.says == "step 3: forward", "an observer that was replaced knows no pulse yet: no start of workers"
    log = AttemptLog(tmp_path)
    log.add("started", 3, world=2)
    log.add("ended", 3, reason="rank 1: its process died")
    log.add("started", 4, world=1)
    assert poll() == ["attempt 3 ended: rank 1: its process died", "attempt 4 starts with 1 ranks"]
    assert poll(attempt=4, phases=4, step=1) == ["workers", "process group", "places", "groups", "model", "first plan"]
    log.add("ended", 4, reason="finished")
    assert poll() == []
