"""A run whose processes are killed at random, and what must be true at its end.

    python -m tests.chaos --kills 100 --seed 7

Worlds of 1 to 9 ranks on nodes of unequal size; what is killed: a worker in the middle of a step, the planner, a worker
while a checkpoint is written, a worker during a resize, and workers twice in a row. At the end every sample of the run
occurs exactly once in the effective history, and every step's loss is that of a run that nothing happened to.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from raypack.config import Config
from raypack.observe.observer import RunObserver
from raypack.observe.record import StepRecord
from raypack.observe.steps import read_steps
from raypack.training.loop import Job
from tests.chaos_ranks import corpus_of, run_rank, serve_plans
from tests.machine import scaled
from tests.pool import processes

KINDS = ("worker", "planner", "checkpoint", "resize", "twice")
WORLDS = range(1, 10)
QUIET_SECONDS = 120.0  # without a step trained, on a quick, quiet machine
DENSE: dict[str, dict[str, Any]] = {
    "model": {
        "name": "chaos", "pattern": "FSL", "layers": 3, "width": 16, "heads": 4, "kv_heads": 2, "head_dim": 4,
        "window": 16, "ffn_width": 32, "vocabulary": 257, "linear_chunk": 16,
    },
    "data": {"max_sample_tokens": 256, "tokens_per_step": 768, "holdout_tokens": 0},
    "plan": {"cluster": "local-2x4", "budget": 20},
    "train": {"eval_every": 0, "checkpoint_every": 3, "warmup_steps": 1, "checkpoint_keep": 2},
    "timeouts": {"collective": scaled(40.0), "plan": scaled(40.0)},
}  # fmt: skip
#: float64: other worlds round otherwise, and a token at the edge goes to another expert
EXPERTS = {"model": {"experts": 4, "experts_active": 2, "expert_width": 16}, "train": {"dtype": "float64"}}


def chaos_config(steps: int, *, experts: bool, shard: str) -> Config:
    data = {name: dict(section) for name, section in DENSE.items()}
    if experts:
        for name, section in EXPERTS.items():
            data[name].update(section)
    data["train"]["shard"] = shard
    data["run"] = {"steps": steps, "name": "chaos"}
    return Config.model_validate(data)


@dataclass
class Kill:
    """What was killed, and the seconds until the next step was trained."""

    kind: str
    world: int
    seconds: float = 0.0


@dataclass
class Chaos:
    """One run in `folder`. `kills` = how many processes to kill; then it runs to its end.

    `script` = what to do in place of kills drawn at random; of its words, "leave" kills nothing.
    """

    config: Config
    corpus: str
    folder: Path
    seed: int
    kills: int
    script: Sequence[str] = ()
    done: list[Kill] = field(default_factory=list)
    attempts: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.draw = random.Random(self.seed)
        self.run_dir = self.folder / "run"
        self.processes = processes()
        self.observer = RunObserver(str(self.run_dir), "chaos")
        self.lock = threading.Lock()
        self.ears: dict[tuple[int, int], Connection] = {}
        self.reached = -1
        self.moved_at = time.monotonic()
        self.killed_at = 0.0
        self.sockets = tempfile.TemporaryDirectory(prefix="raypack-chaos-")  # a socket's path must be short
        self.office = Listener(f"{self.sockets.name}/office", "AF_UNIX", backlog=64)
        threading.Thread(target=self._serve, daemon=True).start()

    # -- the ranks' line ---------------------------------------------------------------------------------------

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._answer, args=(self.office.accept(),), daemon=True).start()

    def _answer(self, line: Connection) -> None:
        with suppress(EOFError, OSError):
            kind, rank, attempt = line.recv()
            if kind == "ear":
                self.ears[attempt, rank] = line
                return
            while True:
                kind, content = line.recv()
                with self.lock:
                    if kind == "report":
                        self.observer.report(content)
                        self._note(content.step)
                    else:
                        line.send(self.observer.receipt(content).settled)

    def _note(self, step: int) -> None:
        self.reached, self.moved_at = max(self.reached, step), time.monotonic()
        if self.killed_at and self.done:
            self.done[-1].seconds = time.monotonic() - self.killed_at
            self.killed_at = 0.0

    @property
    def _stuck(self) -> bool:
        return time.monotonic() - self.moved_at > scaled(QUIET_SECONDS)

    # -- the run -----------------------------------------------------------------------------------------------

    def run(self) -> list[StepRecord]:
        """To the end of the run; its records."""
        planner = self._start_planner()
        try:
            todo = [KINDS[i % len(KINDS)] for i in range(self.kills)]
            self.draw.shuffle(todo)
            todo = [*self.script] or todo
            finished = False
            while not finished:
                world = self.draw.choice(WORLDS)
                ranks = self._start_ranks(world)
                try:
                    kind = todo.pop(0) if todo else ""
                    if kind == "planner":
                        planner = self._kill_planner(planner, ranks, world)
                        kind = todo.pop(0) if todo else ""  # the attempt goes on: something else ends it
                        kind = "worker" if kind == "planner" else kind
                    if kind == "twice":
                        todo.insert(0, "start")
                    if kind:
                        self._disturb(kind, ranks, world)
                    codes = self._wait(ranks)
                finally:
                    for rank in ranks:
                        rank.kill()
                        rank.join(10)
                finished = set(codes) == {0}
                assert finished or kind, f"attempt {self.attempts} ended by itself: {codes}\n{self.log()}"
        finally:
            planner.kill()
            planner.join(10)
            with self.lock:
                self.observer.finish()
            self.office.close()
            self.sockets.cleanup()
        return read_steps(self.run_dir)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-4000:] if (self.folder / "log").exists() else ""

    def _start_planner(self) -> Any:
        planner = self.processes.Process(
            target=serve_plans, args=(self.config, self.corpus, f"{self.sockets.name}/planner"), daemon=True
        )
        planner.start()
        return planner

    def _start_ranks(self, world: int) -> list[Any]:
        nodes = self._nodes(world)
        attempt, self.attempts = self.attempts, self.attempts + 1
        with self.lock:
            self.observer.begin(attempt, world)
        job = Job(self.config, self.corpus, str(self.run_dir))
        store = self.folder / f"store-{attempt}"
        arguments = (job, attempt, str(store), f"{self.sockets.name}/planner", f"{self.sockets.name}/office")
        ranks = [
            self.processes.Process(
                target=run_rank, args=(rank, nodes, *arguments, str(self.folder / "log")), daemon=True
            )
            for rank in range(world)
        ]
        for rank in ranks:
            rank.start()
        return ranks

    def _nodes(self, world: int) -> tuple[int, ...]:
        nodes: list[int] = []
        while sum(nodes) < world:
            nodes.append(self.draw.randint(1, min(4, world - sum(nodes))))
        return tuple(nodes)

    def _wait(self, ranks: Sequence[Any]) -> list[int]:
        self.moved_at = time.monotonic()
        for rank in ranks:
            while rank.is_alive() and not self._stuck:
                rank.join(1.0)
        codes = [rank.exitcode for rank in ranks]
        assert None not in codes, f"ranks {[i for i, c in enumerate(codes) if c is None]} hang\n{self.log()}"
        return codes

    # -- the kills ---------------------------------------------------------------------------------------------

    def _disturb(self, kind: str, ranks: Sequence[Any], world: int) -> None:
        """Kill a rank at a moment of the given kind; where the run ends before, it ends."""
        if kind == "start":  # before it has trained a step
            time.sleep(self.draw.uniform(0.0, 1.5))
        elif not self._some_steps(ranks):
            return
        if kind == "checkpoint":
            self._wait_until(ranks, lambda: bool(list((self.run_dir / "checkpoints").glob(".partial-*"))))
            time.sleep(self.draw.uniform(0.0, 0.05))
        elif kind == "resize":
            self._ask_to_leave(self.draw.randrange(world))
            time.sleep(self.draw.uniform(0.0, 0.4))
        elif kind == "leave":
            self._ask_to_leave(self.draw.randrange(world))
            return
        else:
            time.sleep(self.draw.uniform(0.0, 0.3))
        victim = self.draw.choice(ranks)
        if victim.is_alive():
            self._kill(victim, kind, world)

    def _some_steps(self, ranks: Sequence[Any]) -> bool:
        """Let a few steps pass; False where the attempt ended meanwhile."""
        start, count = self.reached, self.draw.randint(1, 4)
        return self._wait_until(ranks, lambda: self.reached >= start + count)

    def _wait_until(self, ranks: Sequence[Any], condition: Any) -> bool:
        self.moved_at = time.monotonic()
        while not condition():
            if any(not rank.is_alive() for rank in ranks):
                return False
            assert not self._stuck, f"no step in {scaled(QUIET_SECONDS):g} s\n{self.log()}"
            time.sleep(0.005)
        return True

    def _ask_to_leave(self, rank: int) -> None:
        ear = self.ears.get((self.attempts - 1, rank))
        if ear is not None:
            with suppress(OSError):
                ear.send("resize")

    def _kill(self, process: Any, kind: str, world: int) -> None:
        os.kill(process.pid, signal.SIGKILL)
        self.done.append(Kill(kind, world))
        self.killed_at = time.monotonic()

    def _kill_planner(self, planner: Any, ranks: Sequence[Any], world: int) -> Any:
        self._some_steps(ranks)
        self._kill(planner, "planner", world)
        planner.join(10)
        time.sleep(self.draw.uniform(0.0, 0.3))
        return self._start_planner()


def unbroken(config: Config, corpus: str, folder: Path) -> list[StepRecord]:
    """The same run, of one rank that nothing happens to."""
    run = Chaos(config, corpus, folder, seed=0, kills=0)
    run.draw = random.Random()
    run._nodes = lambda world: (1,)  # type: ignore[method-assign]
    run.draw.choice = lambda options: 1  # type: ignore[method-assign, assignment]
    return run.run()


def check(records: Sequence[StepRecord], whole: Sequence[StepRecord], tolerance: float) -> None:
    """Every sample once in the effective history, and the losses of the unbroken run."""
    effective = [record for record in records if record.effective]
    assert [r.step for r in effective] == [r.step for r in whole]
    assert [(r.epoch, r.first_sample, r.sample_count) for r in effective] == [
        (r.epoch, r.first_sample, r.sample_count) for r in whole
    ]
    assert [r.sample_ids_digest for r in effective] == [r.sample_ids_digest for r in whole]
    for before, after in pairwise(effective):
        goes_on = after.epoch == before.epoch and after.first_sample == before.first_sample + before.sample_count
        assert goes_on or (after.epoch > before.epoch and after.first_sample == 0), (before, after)
    for mine, theirs in zip(effective, whole, strict=True):
        assert mine.loss is not None
        assert theirs.loss is not None
        assert abs(mine.loss - theirs.loss) <= tolerance * abs(theirs.loss), (mine.step, mine.loss, theirs.loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="raypack-chaos-run-") as name:
        folder = Path(name)
        corpus = str(corpus_of(folder))
        left, number, seconds = arguments.kills, 0, []
        kinds: Counter[str] = Counter()
        replayed = steps = attempts = 0
        while left > 0:
            kills = min(20, left)
            experts, shard = bool(number % 2), ("none", "world")[number // 2 % 2]
            config = chaos_config(40 + 6 * kills, experts=experts, shard=shard)
            run = Chaos(config, corpus, folder / f"run-{number}", arguments.seed + number, kills)
            records = run.run()
            check(records, unbroken(config, corpus, folder / f"whole-{number}"), 1e-9 if experts else 1e-4)
            kinds.update(kill.kind for kill in run.done)
            seconds += [kill.seconds for kill in run.done if kill.seconds]
            steps += config.run.steps
            replayed += len(records) - config.run.steps
            attempts += run.attempts
            left, number = left - max(1, len(run.done)), number + 1
            print(f"run {number}: {len(run.done)} kills, {run.attempts} attempts, {config.run.steps} steps", flush=True)
    print(f"kills: {dict(sorted(kinds.items()))}; attempts {attempts}, steps {steps}, replayed {replayed}")
    median, most = statistics.median(seconds), max(seconds)
    print(f"seconds from a kill to the next trained step: median {median:.1f}, most {most:.1f}")


if __name__ == "__main__":
    main()
