"""One tree of frozen settings. A TOML run file is laid over the defaults, `--section.key value` over the file.

Every value is checked on construction; an unknown key is an error. Units are in the field descriptions.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from raypack.errors import RaypackError

T = TypeVar("T", bound=BaseModel)


class Section(BaseModel):
    """Frozen, closed to unknown keys, strict about nonsense."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(Section):
    """The network. `pattern` is repeated until `layers` layers are there: F = full, S = sliding-window, L = linear
    attention."""

    preset: str = Field("", description="model preset or TOML file that the other fields override")
    name: str = Field("custom", description="what tables call this model")
    pattern: str = Field("FSSS", description="layer kinds, repeated: F full attention, S sliding window, L linear")
    layers: int = Field(8, ge=1, description="number of layers")
    width: int = Field(128, ge=1, description="hidden size")
    heads: int = Field(8, ge=1, description="query heads")
    kv_heads: int = Field(4, ge=1, description="key and value heads; divides heads")
    head_dim: int = Field(16, ge=2, description="size of one head; even, for RoPE")
    qk_norm: bool = Field(False, description="RMSNorm on each query and key head")
    window: int = Field(256, ge=1, description="tokens a sliding-window query sees, itself included")
    sinks: int = Field(0, ge=0, description="first tokens of a document that every S query also sees")
    linear_decay: Literal["none", "head", "gate"] = Field(
        "head",
        description="L layers: no decay, a fixed one for each KV head, or a gate for each channel, from the data",
    )
    linear_gate_rank: int = Field(16, ge=1, description="L layers: rank of the gate's projection")
    linear_feature: Literal["none", "relu", "elu", "silu"] = Field(
        "none", description="L layers: feature map of queries and keys; elu is elu + 1"
    )
    linear_norm: bool = Field(True, description="L layers: RMSNorm on each head's output")
    linear_conv: int = Field(0, ge=0, le=64, description="L layers: taps of the short causal convolution; 0 = none")
    linear_chunk: int = Field(64, ge=1, le=1024, description="L layers: rows of a chunk; a power of two")
    ffn_width: int = Field(512, ge=1, description="hidden size of a dense SwiGLU, used where experts = 0")
    experts: int = Field(0, ge=0, description="experts of an MoE layer; 0 = dense")
    experts_active: int = Field(2, ge=1, description="experts chosen for a token (top-k)")
    expert_width: int = Field(128, ge=1, description="hidden size of one expert")
    shared_expert_width: int = Field(0, ge=0, description="hidden size of the shared expert; 0 = none")
    vocabulary: int = Field(257, ge=2, description="token ids")
    tied_head: bool = Field(False, description="the output head is the embedding")
    rope_base: float = Field(10_000.0, gt=1, description="RoPE base")
    norm_eps: float = Field(1e-6, gt=0, description="epsilon of RMSNorm")
    dropout: float = Field(0.0, ge=0, description="must be 0: see the error text")

    @field_validator("pattern")
    @classmethod
    def _known_kinds(cls, pattern: str) -> str:
        unknown = sorted(set(pattern) - set("FSL"))
        if not pattern or unknown:
            raise ValueError(f"pattern {pattern!r} must be made of F (full), S (sliding window) and L (linear)")
        return pattern

    @model_validator(mode="after")
    def _possible(self) -> ModelConfig:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even, RoPE turns pairs")
        if self.linear_chunk & (self.linear_chunk - 1):
            raise ValueError(f"linear_chunk = {self.linear_chunk} must be a power of two")
        if self.linear_conv == 1:
            raise ValueError("linear_conv = 1 would only scale each channel: give 2 taps or more, or 0 for none")
        if self.experts and self.experts_active > self.experts:
            raise ValueError(f"experts_active = {self.experts_active} exceeds experts = {self.experts}")
        if self.dropout > 0:
            raise ValueError(
                f"dropout = {self.dropout} is refused: a mask that does not depend on the plan needs a counter-based "
                "generator, which the attention kernels lack; set it to 0"
            )
        return self

    @property
    def kinds(self) -> str:
        """The kind of every layer, first to last."""
        return (self.pattern * self.layers)[: self.layers]


class ClusterConfig(Section):
    """What the cost model knows of the machines. Preset figures never change during a run."""

    name: str = Field("custom", description="what tables call this cluster")
    source: str = Field("", description="where the figures come from")
    nodes: int = Field(2, ge=1, description="machines")
    ranks_per_node: int = Field(4, ge=1, description="workers of one machine")
    peak_flops: float = Field(989e12, gt=0, description="FLOP/s of one rank, for MFU")
    matmul_share: float = Field(0.55, gt=0, le=1, description="share of the peak that matrix products attain")
    attention_share: float = Field(0.55, gt=0, le=1, description="share of the peak that attention attains")
    intra_rate: float = Field(280e9, gt=0, description="bytes/s of one rank inside a node")
    inter_rate: float = Field(40e9, gt=0, description="bytes/s of one rank across nodes")
    intra_latency: float = Field(20e-6, ge=0, description="seconds a collective inside a node")
    inter_latency: float = Field(40e-6, ge=0, description="seconds a collective across nodes")
    launch_seconds: float = Field(5e-6, ge=0, description="seconds a kernel call")
    round_seconds: float = Field(0.01, ge=0, description="seconds a non-empty round costs besides its work")
    rank_tokens_max: int = Field(32_768, ge=1, description="cap: tokens of one rank in one round")
    rank_tokens_max_selective: int = Field(0, ge=0, description="the cap of rounds that replay the feed-forward part")
    rank_tokens_max_full: int = Field(0, ge=0, description="the cap of rounds that replay all; 0 = rank_tokens_max")
    sync: Literal["step", "layer", "node"] = Field("step", description="where ranks wait for each other")
    prefetch_layers: int = Field(1, ge=0, description="layers of slack that parameter prefetch gives sync = layer")


class RunSection(Section):
    name: str = Field("", description="run directory below root; empty = the run file's name and the time")
    root: str = Field("runs", description="directory of all runs")
    steps: int = Field(60, ge=1, description="optimizer steps")
    seed: int = Field(0, ge=0, description="of the weights")
    resume: str = Field(
        "never", description="never, auto (newest complete checkpoint of this run), or a checkpoint's path or URL"
    )
    failures_max: int = Field(
        3, ge=0, description="failures in a row, without a new checkpoint between, after which a run gives up"
    )
    ray_address: str = Field("", description="Ray cluster: empty = the surrounding one, else start a local one")


class DataSection(Section):
    corpus: str = Field("", description="corpus directory; empty = the embedded default, built on first use")
    max_sample_tokens: int = Field(16_384, ge=2, description="longest sample, tokens")
    long_documents: Literal["error", "truncate", "skip"] = Field("truncate", description="documents above it")
    tokens_per_step: int = Field(65_536, ge=1, description="a step takes samples until the next would exceed this")
    seed: int = Field(0, ge=0, description="of the order of samples")
    holdout_tokens: int = Field(32_768, ge=0, description="tokens of held-out documents in one evaluation; 0 = none")


class PlanSection(Section):
    policy: Literal["static", "dynamic", "repack", "repack+parents", "joint"] = Field("joint", description="policy")
    cluster: str = Field("local-2x4", description="cluster preset or TOML file that the cost model uses")
    sync: Literal["", "step", "layer", "node"] = Field("", description="overrides the cluster's sync")
    rank_tokens_max: int = Field(0, ge=0, description="overrides the cluster's cap; 0 = the cluster's")
    look_ahead: int = Field(2, ge=1, description="steps planned ahead")
    budget: int = Field(2000, ge=0, description="evaluations of local search a step; 0 = plain greedy")
    attention: Literal["auto", "ulysses", "kv_gather", "hsap"] = Field(
        "auto",
        description="full layers: exchange heads, gather K and V (parent = child), spread over nodes, or the cheapest",
    )
    keep: bool = Field(False, description="write every plan to the run directory")


class TopologySection(Section):
    workers: int = Field(8, ge=1, description="ranks; of an elastic run the most")
    workers_min: int = Field(0, ge=0, description="fewest ranks that an elastic run goes on with; 0 = workers")
    resize_seconds: float = Field(
        60.0, gt=0, description="an elastic run looks this often whether the cluster has room for more ranks"
    )
    nodes: tuple[int, ...] = Field((), description="ranks of each node, in place of the machines (trials)")
    cpus_per_worker: float = Field(1.0, ge=0, description="Ray CPUs a worker asks for")
    gpus_per_worker: float = Field(0.0, ge=0, description="Ray GPUs a worker asks for; above 0 means CUDA and NCCL")

    @model_validator(mode="after")
    def _adds_up(self) -> TopologySection:
        if self.nodes and (min(self.nodes) < 1 or sum(self.nodes) != self.workers):
            raise ValueError(f"nodes = {list(self.nodes)} must be positive and add up to workers = {self.workers}")
        if self.workers_min > self.workers:
            raise ValueError(f"workers_min = {self.workers_min} exceeds workers = {self.workers}, the most")
        if self.nodes and self.elastic:
            raise ValueError(f"nodes = {list(self.nodes)} fixes the world: leave workers_min = {self.workers_min} out")
        return self

    @property
    def least(self) -> int:
        """The fewest ranks that the run goes on with."""
        return self.workers_min or self.workers

    @property
    def elastic(self) -> bool:
        return self.least < self.workers


class TrainSection(Section):
    dtype: Literal["float32", "bfloat16", "float64"] = Field("float32", description="of weights and activations")
    shard: Literal["none", "world"] = Field("none", description="parameters: replicated, or FSDP2 over the world")
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="replay in backward: nothing, the feed-forward part, or whole layers with exchanges"
    )
    chunk_tokens: int = Field(2048, ge=1, description="rows of logits or feed-forward activations alive at once")
    lr: float = Field(3e-3, gt=0, description="peak learning rate")
    lr_min_share: float = Field(0.1, ge=0, le=1, description="last learning rate as a share of the peak")
    warmup_steps: int = Field(5, ge=0, description="linear warm-up")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW")
    eps: float = Field(1e-8, gt=0, description="AdamW")
    weight_decay: float = Field(0.1, ge=0, description="AdamW, on matrices only")
    clip_norm: float = Field(1.0, ge=0, description="global gradient norm; 0 = no clipping")
    balance_rate: float = Field(0.01, ge=0, description="largest move of an expert's balancing bias in a step")
    eval_every: int = Field(20, ge=0, description="steps between held-out losses; 0 = never")
    checkpoint_every: int = Field(50, ge=0, description="steps between checkpoints; 0 = only at the end")
    checkpoint_keep: int = Field(2, ge=1, description="complete checkpoints kept")
    checkpoint_root: str = Field(
        "", description="where checkpoints go, below the run's name: a directory or URL; empty = the run directory"
    )

    @field_validator("checkpoint_root")
    @classmethod
    def _the_same_everywhere(cls, root: str) -> str:
        if root and not root.startswith("/") and "://" not in root:
            raise ValueError(f"checkpoint_root = {root!r} must be an absolute directory or a URL (s3://bucket/prefix)")
        return root


class ObserveSection(Section):
    port: int = Field(0, ge=0, le=65_535, description="of /metrics; 0 = any free one, written to the run directory")
    bind: str = Field("127.0.0.1", description="address /metrics listens on; node = the head node's own")
    table: bool = Field(True, description="live table while the run goes on")
    trace: int = Field(-1, ge=-1, description="step whose Chrome trace, of all ranks, is written; -1 = none")
    tensorboard: bool = Field(False, description="write TensorBoard events beside the records")


class TimeoutSection(Section):
    collective: float = Field(600.0, gt=0, description="seconds for one collective")
    plan: float = Field(300.0, gt=0, description="seconds to wait for a plan")
    start: float = Field(300.0, gt=0, description="seconds until workers ask for their first plan")
    actor: float = Field(60.0, gt=0, description="seconds for any other actor call")
    leave: float = Field(180.0, gt=0, description="seconds a resize waits for the step and checkpoint before it")
    nodes: float = Field(1800.0, gt=0, description="seconds a run that lost nodes waits for enough of them")


class Config(Section):
    """Everything a run is made of."""

    run: RunSection = RunSection()
    model: ModelConfig = ModelConfig()
    data: DataSection = DataSection()
    plan: PlanSection = PlanSection()
    topology: TopologySection = TopologySection()
    train: TrainSection = TrainSection()
    observe: ObserveSection = ObserveSection()
    timeouts: TimeoutSection = TimeoutSection()


def read_toml(path: str | Path) -> dict[str, Any]:
    """Raises RaypackError where the file is missing or no TOML."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RaypackError(f"cannot read {path}: {error}") from None


def preset_names(kind: Literal["models", "clusters"]) -> list[str]:
    folder = resources.files("raypack.presets").joinpath(kind)
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def preset_or_file(kind: Literal["models", "clusters"], name: str) -> dict[str, Any]:
    """The TOML of a shipped preset, or of a file where `name` ends in .toml."""
    if name.endswith(".toml"):
        return read_toml(name)
    if name not in preset_names(kind):
        raise RaypackError(
            f"no {kind[:-1]} preset {name!r}: there are {', '.join(preset_names(kind))}, or give a .toml file"
        )
    return tomllib.loads(resources.files("raypack.presets").joinpath(kind, f"{name}.toml").read_text(encoding="utf-8"))


def load_model(name: str, overrides: dict[str, Any] | None = None) -> ModelConfig:
    """A model preset or TOML file, with single fields replaced."""
    data = {"name": Path(name).stem, **preset_or_file("models", name), **(overrides or {})}
    return build(ModelConfig, data, "model")


def load_cluster(name: str, overrides: dict[str, Any] | None = None) -> ClusterConfig:
    """A cluster preset or TOML file, with single fields replaced."""
    data = {"name": Path(name).stem, **preset_or_file("clusters", name), **(overrides or {})}
    return build(ClusterConfig, data, "cluster")


def build(kind: type[T], data: dict[str, Any], where: str = "") -> T:
    """Construct a settings model; the first fault becomes one line that names the key, the value and the rule."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise RaypackError(first_fault(error, where)) from None


def first_fault(error: ValidationError, where: str = "") -> str:
    fault = error.errors()[0]
    path = ".".join(str(part) for part in ((where,) if where else ()) + fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"unknown key {path}: see --help for the known ones"
    text = fault["msg"].removeprefix("Value error, ")
    given = "" if fault["type"] == "value_error" else f" = {fault['input']!r}"
    return f"{path}{given}: {text}"
