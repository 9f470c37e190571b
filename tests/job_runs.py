"""Jobs as a person starts them: a process, its output, everything it started; a tiny run file and corpora for them."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import tomli_w

from raypack.data.build import build_corpus
from tests.machine import scaled

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "jobs" / "train_1f3s.py"
MARK = "RAYPACK_TEST_MARK"
# A shell that runs the tests in the background makes its children deaf to Ctrl-C; this one hears it again.
HEARING = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
LIMIT = 240.0  # seconds on a quick, quiet machine, like every limit that the functions below take

TINY: dict[str, dict[str, Any]] = {
    "run": {"steps": 6},
    "model": {
        "name": "tiny", "pattern": "FS", "layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "head_dim": 4,
        "window": 16, "experts": 4, "experts_active": 2, "expert_width": 16, "vocabulary": 257,
    },
    "data": {"max_sample_tokens": 256, "tokens_per_step": 512, "holdout_tokens": 256},
    "plan": {"cluster": "local-2x4", "budget": 20},
    "topology": {"workers": 2, "nodes": [1, 1]},
    "train": {"eval_every": 0, "checkpoint_every": 0, "warmup_steps": 1},
}  # fmt: skip


def tiny_run(folder: Path, corpus: Path, **sections: dict[str, Any]) -> Path:
    """A run file for two workers in `folder`, with runs and corpora below it; `sections` are laid over `TINY`."""
    data = {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in {**TINY, **sections}}
    data["data"]["corpus"] = str(corpus)
    data["run"].setdefault("root", str(folder / "runs"))
    file = folder / "tiny.toml"
    file.write_text(tomli_w.dumps(data), encoding="utf-8")
    return file


def tiny_corpus(out: Path, documents: int = 200, longest: int = 400, seed: int = 1) -> Path:
    """Documents of a few words repeated, of very unequal lengths."""
    draw = random.Random(seed)
    folder = out.with_name(out.name + "-texts")
    folder.mkdir(parents=True)
    words = ["layer", "parent", "child", "round", "plan", "rank", "node", "block"]
    for i in range(documents):
        length = min(longest, int(draw.paretovariate(1.2) * 20))
        text = " ".join(draw.choice(words) for _ in range(length // 5 + 1))
        (folder / f"{i:04d}.txt").write_text(f"{i} {text}"[:length], encoding="utf-8")
    build_corpus([folder], out, holdout=0.05, progress=False)
    return out


def job_environment(home: Path, **more: str) -> dict[str, str]:
    """Of a job process: no Ray around it, no token, its own RAYPACK_HOME."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "RAYPACK_HOME": str(home), "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", **more}


# The job script, with lines of a test's own before every step on every rank.
BEFORE_STEP = """
import sys, time
sys.path.insert(0, {root!r})
import raypack.driver.launch as launch
from raypack.driver.job import main


def train_worker(arguments):
    import torch.distributed as dist
    import raypack.training.loop as loop
    import raypack.driver.worker as worker

    step = loop.train_step

    def changed(trainer, work, trouble=None, *, leave=False):
{before}
        return step(trainer, work, trouble, leave=leave)

    loop.train_step = changed
    worker.train_worker(arguments)


launch.train_worker = train_worker
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def script_before_step(file: Path, before: str) -> Path:
    """A job script at `file` that runs the lines `before` ahead of each step; they see `work` and `dist`."""
    file.write_text(BEFORE_STEP.format(root=str(ROOT), before=textwrap.indent(before.strip("\n"), " " * 8)))
    return file


class Started:
    """A process with everything it starts; on leaving the `with` block what is left of it is killed, pid by pid."""

    def __init__(self, command: list[str], folder: Path, env: dict[str, str], cwd: Path | None = None) -> None:
        self.mark = uuid.uuid4().hex
        folder.mkdir(parents=True, exist_ok=True)
        self._out, self._err = folder / f"{self.mark}.out", folder / f"{self.mark}.err"
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-c", HEARING, *command], stdout=out, stderr=err, stdin=subprocess.DEVNULL,
                cwd=cwd or folder, env={**env, MARK: self.mark}, start_new_session=True,
            )  # fmt: skip

    @property
    def out(self) -> str:
        return self._out.read_text(encoding="utf-8", errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(encoding="utf-8", errors="replace")

    def wait_until(self, there: Callable[[], Any], what: str, timeout: float = LIMIT) -> Any:
        """The first true value of `there()`; fails where the process ends, or the time is up, before."""
        timeout = scaled(timeout)
        deadline = time.monotonic() + timeout
        while not (value := there()):
            ended = self.process.poll()
            assert ended is None, f"ended with {ended} before {what}:\n{self.out}\n{self.err}"
            assert time.monotonic() < deadline, f"{timeout:g} s without {what}:\n{self.out}\n{self.err}"
            time.sleep(0.05)
        return value

    def wait(self, timeout: float = LIMIT) -> int:
        """The exit code."""
        timeout = scaled(timeout)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {timeout:g} s:\n{self.out}\n{self.err}") from None

    def interrupt(self) -> None:
        """Ctrl-C, as a terminal sends it: to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def family(self, title: str = "") -> list[int]:
        """Living processes that this one started, those whose command line holds `title`."""
        return [pid for pid in _marked(self.mark) if pid != self.process.pid and title in _command(pid)]

    def wait_for_family_to_end(self, timeout: float = 20.0) -> list[str]:
        """Command lines of what still lives after `timeout` seconds."""
        deadline = time.monotonic() + scaled(timeout)
        while (left := self.family()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [_command(pid) for pid in left]

    def __enter__(self) -> Started:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(10)
        # Whatever dies may have started something a moment before.
        for _ in range(50):
            left = self.family()
            for pid in left:
                _kill(pid)
            if not left:
                break
            time.sleep(0.1)


def start_job(folder: Path, *arguments: str, script: Path = SCRIPT, env: dict[str, str] | None = None) -> Started:
    """`python jobs/train_1f3s.py ARGUMENTS`, from a directory that is not the repository."""
    command = [sys.executable, str(script), *arguments]
    return Started(command, folder / "console", env or job_environment(folder / "home"))


def _marked(mark: str) -> list[int]:
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0") and _state(entry) != "Z":
                    found.append(int(entry.name))
            except (OSError, IndexError):
                continue  # ended meanwhile
    return found


def _state(entry: Path) -> str:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """A Ray head started in `cwd`, and more nodes on this machine, of `cpus` CPUs each; `python` is the tests' own.

    A context manager.
    """

    def __init__(self, folder: Path, cwd: Path, cpus: tuple[int, ...]) -> None:
        self.home, self.cpus, self._cwd, self._folder = folder / "home", cpus, cwd, folder
        self.session = Path(tempfile.mkdtemp(prefix="raypack-ray-"))  # short: sockets live in it
        self.address, self.dashboard = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        programs = Path(sys.executable).parent
        self.ray = str(programs / "ray")
        self.env = job_environment(self.home, PATH=f"{programs}:{os.environ['PATH']}")
        self._nodes: list[Started] = []

    def _start(self, number: int) -> None:
        flags: dict[str, Any] = {
            "--num-cpus": self.cpus[number], "--temp-dir": self.session / f"node-{number}",
            "--object-store-memory": 100 * 2**20, "--dashboard-agent-listen-port": 0,
            "--min-worker-port": 0, "--max-worker-port": 0,
        }  # fmt: skip
        if number == 0:
            flags |= {
                "--port": self.address.split(":")[1], "--dashboard-port": self.dashboard.split(":")[1],
                "--ray-client-server-port": free_port(),
            }  # fmt: skip
        command = [self.ray, "start", "--block", *(["--head"] if number == 0 else ["--address", self.address])]
        command += ["--disable-usage-stats", *(str(part) for flag in flags.items() for part in flag)]
        node = Started(command, self._folder / f"node-{number}", self.env, self._cwd)
        self._nodes.append(node)
        node.wait_until(lambda: "Ray runtime started" in node.out, f"node {number}")

    def submit(self, folder: Path, *arguments: str, cwd: Path | None = None) -> Started:
        """`ray job submit ARGUMENTS`, from `cwd`, by default a directory that has nothing to do with the cluster's."""
        env = {**self.env, "RAY_ADDRESS": f"http://{self.dashboard}"}
        return Started([self.ray, "job", "submit", *arguments], folder / "submit", env, cwd)

    def __enter__(self) -> Cluster:
        try:
            for number in range(len(self.cpus)):  # one after the other: raylets that start at once may race
                self._start(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for node in reversed(self._nodes):
            node.__exit__(None, None, None)
        shutil.rmtree(self.session, ignore_errors=True)


def clean_copy(target: Path) -> Path:
    """What a clone of the repository would hold if all were committed; skips the test outside a repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("needs git and a repository, to know what belongs to a clone")
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target
