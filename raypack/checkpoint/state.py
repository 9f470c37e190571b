"""`state.json` of a checkpoint: where the run stands, what it was trained with, and every file with its size.

Nothing here touches a tensor: the driver looks at checkpoints before any worker exists.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raypack.checkpoint.addresses import locate
from raypack.checkpoint.storage import STATE_FILE, Store, is_url, reason, step_of
from raypack.comm.agreement import digest_of
from raypack.config import Config, DataSection, ModelConfig, Section
from raypack.errors import RaypackError
from raypack.plan.plan import StreamState

STATE_VERSION, READABLE_VERSIONS = 2, (1, 2)
# What names things, says where they lie, or is only looked at: another value is no other model and no other stream.
NOT_COMPARED = {"model": {"name", "preset"}, "data": {"corpus", "holdout_tokens"}}


class Damaged(RaypackError):
    """No complete checkpoint: cut off, incomplete, or not one."""


def model_digest(model: ModelConfig) -> str:
    """What a checkpoint's weights belong to: every field but those that only name the model."""
    return digest_of(model.model_dump_json(exclude=NOT_COMPARED["model"])).hex()


@dataclass(frozen=True)
class RunState:
    """Where a run stands: `step` steps are applied, the stream goes on at `stream`.

    Attributes:
        model: `model_digest`.
        corpus: the corpus's fingerprint.
        config: sections `model`, `data`, `train` and `run` it was trained with; empty in files of version 1.
        files: bytes by name.
    """

    step: int
    stream: StreamState
    model: str
    corpus: str
    config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, corpus: str, step: int, stream: StreamState) -> RunState:
        """The state after `step` steps; `corpus` = its fingerprint, `stream` = of the last applied plan."""
        kept = config.model_dump(mode="json", include={"model", "data", "train", "run"})
        return cls(step, stream, model_digest(config.model), corpus, kept)

    def to_json(self) -> str:
        data = {
            "version": STATE_VERSION,
            "step": self.step,
            "stream": self.stream._asdict(),
            "model": self.model,
            "corpus": self.corpus,
            "config": self.config,
            "files": self.files,
        }
        return json.dumps(data, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunState:
        """Raises ValueError, KeyError, TypeError or AttributeError where `text` is none of ours."""
        data = json.loads(text)
        if data["version"] not in READABLE_VERSIONS:
            raise ValueError(
                f"version {data['version']!r}, this raypack reads {', '.join(map(str, READABLE_VERSIONS))}"
            )
        config = {str(name): dict(section) for name, section in data.get("config", {}).items()}
        files = {str(name): int(size) for name, size in data["files"].items()}
        stream = StreamState(**data["stream"])
        return cls(int(data["step"]), stream, str(data["model"]), str(data["corpus"]), config, files)

    @classmethod
    def read(cls, address: str | os.PathLike[str]) -> RunState:
        """The state of the checkpoint at a path or URL.

        Raises:
            Damaged: it is no checkpoint, or a file of it is missing or has lost its end.
            RaypackError: the storage behind the URL does not answer.
        """
        store, name = locate(address)
        return read_state(store, name)

    def with_files(self, files: Mapping[str, int]) -> RunState:
        return replace(self, files=files)


def read_state(store: Store, name: str) -> RunState:
    """As `RunState.read`, of the checkpoint `name` of a store."""
    try:
        state = RunState.from_json(store.read(name))
        sizes = store.sizes(name)
        for file, size in state.files.items():
            if file not in sizes:
                raise ValueError(f"{file} is missing")
            if sizes[file] != size:
                raise ValueError(f"{file} has {sizes[file]} bytes, not {size}")
    except FileNotFoundError:
        raise _damaged(store.address_of(name), f"{STATE_FILE} is missing") from None
    except OSError as error:
        # A directory that cannot be read is as good as gone; a server that is down for a minute must never look like
        # an older state of the run.
        if is_url(store.address):
            raise RaypackError(
                f"cannot read {store.address_of(name)}: {reason(error)}; is its storage there?"
            ) from None
        raise _damaged(store.address_of(name), f"{type(error).__name__}: {reason(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(store.address_of(name), f"{type(error).__name__}: {error}") from None
    return state


def _damaged(address: str, why: str) -> Damaged:
    return Damaged(f"{address} is no complete checkpoint ({why}): give another one, or --run.resume never")


def newest(store: Store) -> tuple[str | None, list[str]]:
    """The address of the newest complete checkpoint, and a line about each newer one that was passed over.

    Raises:
        RaypackError: the storage behind a URL does not answer.
    """
    notes: list[str] = []
    try:
        names = store.names()
    except OSError as error:
        raise RaypackError(f"cannot list {store.address}: {reason(error)}; is its storage there?") from None
    for name in names:
        try:
            read_state(store, name)
        except Damaged as error:
            why = str(error).partition(" is no complete checkpoint (")[2].rpartition("):")[0]
            notes.append(f"passed over {store.address_of(name)}, which is damaged or was never finished: {why}")
        else:
            return store.address_of(name), notes
    return None, notes


def newest_step(store: Store) -> int:
    """Step of the newest complete checkpoint; -1 where there is none, or where the storage does not answer."""
    try:
        found, _ = newest(store)
    except RaypackError:
        return -1
    return step_of(locate(found)[1]) if found else -1


def check_same(address: str, state: RunState, config: Config, corpus: str) -> None:
    """That the run may go on from the checkpoint: same model, same stream. Learning rate and steps may change.

    Args:
        corpus: fingerprint of the run's corpus.

    Raises:
        RaypackError: lists every setting that differs.
    """
    found = [*_differences(state, "model", config.model), *_differences(state, "data", config.data)]
    if found:
        if state.corpus != corpus:
            found.append(_corpora(state.corpus, corpus))
        raise RaypackError(
            f"{address} was trained with {'; '.join(found)}: use the config.toml of its run, or --run.resume never"
        )
    if state.model != model_digest(config.model) and "model" not in state.config:
        raise RaypackError(
            f"{address} holds another model than [model] describes: use the config.toml of its run, or "
            "--run.resume never"
        )
    if state.corpus != corpus:
        raise RaypackError(
            f"{address} was trained on another corpus ({_corpora(state.corpus, corpus)}): give that one as data.corpus"
        )


def _corpora(saved: str, here: str) -> str:
    return f"data.corpus of fingerprint {saved[:12]}, this run has {here[:12]}"


def _differences(state: RunState, name: str, section: ModelConfig | DataSection) -> Iterator[str]:
    """`model.layers = 8, this run has 12` for each setting; one that the file lacks counts as its default."""
    saved = state.config.get(name)
    if saved is None:
        return
    defaults, here = _plain(type(section)()), _plain(section)
    for key in sorted((here.keys() | saved.keys()) - NOT_COMPARED[name]):
        then = saved.get(key, defaults.get(key))
        if key not in here:
            yield f"{name}.{key} = {_shown(then)}, which this raypack does not know"
        elif then != here[key]:
            yield f"{name}.{key} = {_shown(then)}, this run has {_shown(here[key])}"


def _plain(section: Section) -> dict[str, Any]:
    return section.model_dump(mode="json")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, str) else str(value)
