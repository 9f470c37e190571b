"""One tree of frozen settings. A TOML run file is laid over the defaults, `--section.key value` over the file.

Every value is checked on construction; an unknown key is an error. A number's type says its unit (`raypack.units`);
descriptions are what `--help` and docs/run-file.md show: up to the first ";" a line of the short help.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from raypack.errors import RaypackError
from raypack.near_miss import did_you_mean, near_miss
from raypack.settings import first_fault, shown
from raypack.units import (
    BytesPerSecond,
    Directory,
    DirectoryName,
    Experts,
    Features,
    FlopsPerSecond,
    Heads,
    Host,
    Layers,
    Nodes,
    Place,
    Plain,
    Ranks,
    RanksOfNodes,
    Seconds,
    Seed,
    Share,
    Steps,
    Title,
    Tokens,
    Unit,
)

T = TypeVar("T", bound=BaseModel)


class Section(BaseModel):
    """Frozen, closed to unknown keys, strict about nonsense."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(Section):
    """The network. `pattern` is repeated until `layers` layers are there: F = full, S = sliding-window, L = linear
    attention."""

    preset: Place = Field("", description="model preset or .toml file; the other settings of the model override it")
    name: Title = Field("custom", description="what tables call this model")
    pattern: str = Field(
        "FSSS",
        max_length=1000,
        description="layer kinds, repeated; F full attention, S sliding window, L linear attention",
    )
    layers: Layers = Field(8, ge=1, description="number of layers")
    width: Features = Field(128, ge=1, description="hidden size: features of a token between the layers")
    heads: Heads = Field(8, ge=1, description="query heads of an attention layer")
    kv_heads: Heads = Field(4, ge=1, description="key and value heads; divides heads")
    head_dim: Features = Field(16, ge=2, le=4096, description="size of one head; even, for RoPE")
    qk_norm: bool = Field(False, description="RMSNorm on each query and key head")
    window: Tokens = Field(256, ge=1, description="tokens that a query of an S layer sees, itself included")
    sinks: Tokens = Field(0, ge=0, description="first tokens of a document that every query of an S layer also sees")
    linear_decay: Literal["none", "head", "gate"] = Field(
        "head",
        description="how the state of an L layer fades; not at all, by a fixed factor of each KV head, or by a gate of "
        "each channel that the data opens",
    )
    linear_gate_rank: Features = Field(16, ge=1, description="L layers: rank of the gate's projection")
    linear_feature: Literal["none", "relu", "elu", "silu"] = Field(
        "none", description="L layers: feature map of queries and keys; elu is elu + 1"
    )
    linear_norm: bool = Field(True, description="L layers: RMSNorm on each head's output")
    linear_conv: Tokens = Field(
        0, ge=0, le=64, description="L layers: taps of the short causal convolution before attention; 0 = none"
    )
    linear_chunk: Tokens = Field(64, ge=1, le=1024, description="L layers: tokens worked on at once; a power of two")
    ffn_width: Features = Field(512, ge=1, description="hidden size of a dense SwiGLU layer; used where experts = 0")
    experts: Experts = Field(0, ge=0, description="experts of a mixture-of-experts layer; 0 = dense layers")
    experts_active: Experts = Field(2, ge=1, description="experts chosen for each token (top-k)")
    expert_width: Features = Field(128, ge=1, description="hidden size of one expert")
    shared_expert_width: Features = Field(0, ge=0, description="hidden size of the expert of all tokens; 0 = none")
    vocabulary: Annotated[int, Unit("token ids")] = Field(
        257, ge=2, le=2**31 - 1, description="token ids that the model knows; all of the corpus must be below it"
    )
    tied_head: bool = Field(False, description="the output head shares the embedding's weights")
    rope_base: Plain = Field(10_000.0, gt=1, le=1e12, description="base of the rotary position embedding (RoPE)")
    norm_eps: Plain = Field(1e-6, gt=0, le=1, description="added to the mean square inside RMSNorm")
    dropout: Share = Field(0.0, ge=0, description="must be 0; a mask that fits every plan is not there")

    @field_validator("pattern")
    @classmethod
    def _known_kinds(cls, pattern: str) -> str:
        unknown = sorted(set(pattern) - set("FSL"))
        if not pattern or unknown:
            raise ValueError("must be made of F (full), S (sliding window) and L (linear)")
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
        return "".join(islice(cycle(self.pattern), self.layers))


class ClusterConfig(Section):
    """What the cost model knows of the machines. Preset figures never change during a run."""

    name: Title = Field("custom", description="what tables call this cluster")
    source: str = Field("", max_length=10_000, description="where the figures come from")
    nodes: Nodes = Field(2, ge=1, description="machines")
    ranks_per_node: Ranks = Field(4, ge=1, description="workers of one machine")
    peak_flops: FlopsPerSecond = Field(989e12, description="peak of one rank, for MFU")
    matmul_share: Share = Field(0.55, ge=1e-6, description="share of the peak that matrix products attain")
    attention_share: Share = Field(0.55, ge=1e-6, description="share of the peak that attention attains")
    intra_rate: BytesPerSecond = Field(280e9, description="what one rank sends inside a node")
    inter_rate: BytesPerSecond = Field(40e9, description="what one rank sends across nodes")
    intra_latency: Seconds = Field(20e-6, ge=0, description="what a collective inside a node takes besides its bytes")
    inter_latency: Seconds = Field(40e-6, ge=0, description="what a collective across nodes takes besides its bytes")
    launch_seconds: Seconds = Field(5e-6, ge=0, description="what a kernel call takes besides its work")
    round_seconds: Seconds = Field(0.01, ge=0, description="what a non-empty round takes besides its work")
    rank_tokens_max: Tokens = Field(32_768, ge=1, description="cap: tokens of one rank in one round")
    rank_tokens_max_selective: Tokens = Field(
        0, ge=0, description="the cap of rounds that replay the feed-forward part; 0 = rank_tokens_max"
    )
    rank_tokens_max_full: Tokens = Field(0, ge=0, description="the cap of rounds that replay all; 0 = rank_tokens_max")
    sync: Literal["step", "layer", "node"] = Field("step", description="where ranks wait for each other")
    prefetch_layers: Layers = Field(1, ge=0, description="layers of slack that parameter prefetch gives sync = layer")


class RunSection(Section):
    """What the run is called, where it writes, how long it lasts and how it goes on after an end."""

    name: DirectoryName = Field(
        "", description="its directory below run.root; empty = the run file's name and the time"
    )
    root: Directory = Field("runs", min_length=1, description="directory of all runs")
    steps: Steps = Field(60, ge=1, description="optimizer steps of the whole run")
    seed: Seed = Field(0, description="where the random first weights start from")
    resume: Place = Field(
        "never",
        min_length=1,
        description="go on from a checkpoint; never, auto (the newest complete one of this run) or a checkpoint's path "
        "or URL",
    )
    failures_max: Annotated[int, Unit("failures")] = Field(
        3,
        ge=0,
        le=10**6,
        description="failures in a row after which a run gives up; a new checkpoint starts the count again",
    )
    ray_address: Place = Field(
        "", description="HOST:PORT of a Ray head, or auto; empty = the surrounding cluster, else a local one is started"
    )


class DataSection(Section):
    """What the run trains on, and how much of it makes a step."""

    corpus: Directory = Field(
        "", description="corpus directory (`raypack data build`); empty = the embedded default, built on first use"
    )
    max_sample_tokens: Tokens = Field(16_384, ge=2, description="longest sample")
    long_documents: Literal["error", "truncate", "skip"] = Field(
        "truncate", description="what becomes of documents longer than max_sample_tokens"
    )
    tokens_per_step: Tokens = Field(
        65_536, ge=1, description="a step's samples hold at most this together; a longer one is a step of its own"
    )
    seed: Seed = Field(0, description="where the random order of samples starts from")
    holdout_tokens: Tokens = Field(32_768, ge=0, description="size of one evaluation on held-out documents; 0 = none")


class PlanSection(Section):
    """Who decides which ranks compute which sample, and what that planner knows of the machines."""

    policy: Literal["static", "dynamic", "repack", "repack+parents", "joint"] = Field(
        "joint",
        description="how samples get ranks; static one width for all, dynamic one per sample, repack and "
        "repack+parents children inside nodes, joint parent and child of each sample together",
    )
    cluster: Place = Field("local-2x4", description="cluster preset or .toml file with the cost model's rates")
    sync: Literal["", "step", "layer", "node"] = Field(
        "", description="where the cost model lets ranks wait for each other; empty = what the cluster says"
    )
    rank_tokens_max: Tokens = Field(0, ge=0, description="most tokens of a rank in a round; 0 = what the cluster says")
    look_ahead: Steps = Field(2, ge=1, le=1000, description="steps planned before they are asked for")
    budget: Annotated[int, Unit("evaluations")] = Field(
        2000, ge=0, le=10**6, description="plans that local search tries for a step; 0 = plain greedy"
    )
    attention: Literal["auto", "ulysses", "kv_gather", "hsap"] = Field(
        "auto",
        description="how full layers meet across ranks; ulysses exchanges heads, kv_gather gathers K and V (then "
        "parent = child), hsap spreads over nodes, auto takes the cheapest",
    )
    keep: bool = Field(False, description="write every plan to the run directory")


def evenly(workers: int, nodes: int) -> list[int]:
    """`workers` on at most `nodes` nodes, as even as can be."""
    used = min(workers, nodes)
    return [workers // used + (node < workers % used) for node in range(used)]


class TopologySection(Section):
    """How many workers there are, and what each asks of the machines."""

    workers: Ranks = Field(8, ge=1, description="training processes; of an elastic run the most")
    workers_min: Ranks = Field(
        0, ge=0, description="fewest that the run goes on with; 0 = workers, less makes the run elastic"
    )
    resize_seconds: Seconds = Field(
        60.0, gt=0, description="an elastic run looks this often whether the cluster has room for more ranks"
    )
    nodes: RanksOfNodes = Field(
        (), description="workers of each node; in place of the machines, for trials; empty = the machines"
    )
    cpus_per_worker: Annotated[float, Unit("Ray CPUs")] = Field(
        1.0, ge=0, le=1024, description="Ray CPUs that a worker asks for"
    )
    gpus_per_worker: Annotated[float, Unit("Ray GPUs")] = Field(
        0.0,
        ge=0,
        le=64,
        description="Ray GPUs that a worker asks for; above 0 means CUDA and NCCL, and then data.corpus must be given",
    )

    @model_validator(mode="after")
    def _adds_up(self) -> TopologySection:
        if self.nodes and (min(self.nodes) < 1 or sum(self.nodes) != self.workers):
            fit = evenly(self.workers, len(self.nodes))
            raise ValueError(
                f"nodes = {list(self.nodes)} must be positive and add up to workers = {self.workers}: give "
                f'--topology.nodes "{fit}" too'
                + (f", or --topology.workers {sum(self.nodes)} for these nodes" if min(self.nodes) > 0 else "")
            )
        if self.workers_min > self.workers:
            raise ValueError(f"workers_min = {self.workers_min} exceeds workers = {self.workers}, the most")
        if self.nodes and self.elastic:
            raise ValueError(f"nodes = {list(self.nodes)} fixes the world: leave workers_min = {self.workers_min} out")
        return self

    @model_validator(mode="after")
    def _as_ray_counts(self) -> TopologySection:
        for name, each in (("cpus_per_worker", self.cpus_per_worker), ("gpus_per_worker", self.gpus_per_worker)):
            if 0 < each < 1e-4:
                raise ValueError(f"{name} = {each:g} must be 0 or at least 0.0001, what Ray counts in")
        if self.gpus_per_worker > 1 and self.gpus_per_worker % 1:
            raise ValueError(f"gpus_per_worker = {self.gpus_per_worker:g} must be whole above 1, as Ray gives them")
        return self

    @property
    def least(self) -> int:
        """The fewest ranks that the run goes on with."""
        return self.workers_min or self.workers

    @property
    def elastic(self) -> bool:
        return self.least < self.workers


class TrainSection(Section):
    """How the weights learn, what is kept in memory, and what is saved."""

    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        "float32", description="number type of weights and activations"
    )
    shard: Literal["none", "world"] = Field(
        "none", description="where parameters live; none = all on every rank, world = split over all ranks (FSDP2)"
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="what backward computes again to save memory; nothing, the feed-forward part, or whole layers "
        "with their exchanges",
    )
    chunk_tokens: Tokens = Field(2048, ge=1, description="rows of logits or feed-forward activations alive at once")
    lr: Plain = Field(3e-3, gt=0, le=1000, description="peak learning rate, after the warm-up")
    lr_min_share: Share = Field(0.1, ge=0, description="last learning rate as a share of the peak (half a cosine)")
    warmup_steps: Steps = Field(
        5, ge=0, description="first steps, over which the learning rate rises evenly to its peak"
    )
    beta1: Share = Field(
        0.9,
        ge=0,
        lt=1,
        description="AdamW: what its running mean of gradients keeps each step; 0.9 looks back about 10 steps",
    )
    beta2: Share = Field(
        0.95,
        ge=0,
        lt=1,
        description="AdamW: what its running mean of squared gradients keeps each step; 0.95 looks back about 20",
    )
    eps: Plain = Field(
        1e-8,
        gt=0,
        le=1,
        description="AdamW: added to the root of the mean square that a step is divided by; keeps tiny gradients tiny",
    )
    weight_decay: Plain = Field(
        0.1,
        ge=0,
        le=100,
        description="AdamW: times the learning rate, the share of a matrix that each step takes away; norms have none",
    )
    clip_norm: Plain = Field(
        1.0,
        ge=0,
        le=1e9,
        description="longest gradient, over all parameters together; longer ones are scaled down; 0 = no clipping",
    )
    balance_rate: Plain = Field(
        0.01, ge=0, le=1, description="largest move of an expert's balancing bias in a step; 0 = no balancing"
    )
    eval_every: Steps = Field(20, ge=0, description="steps between held-out losses; 0 = never")
    checkpoint_every: Steps = Field(50, ge=0, description="steps between checkpoints; 0 = only at the end")
    checkpoint_keep: Annotated[int, Unit("checkpoints")] = Field(
        2, ge=1, le=10**6, description="complete checkpoints that are kept, the newest"
    )
    checkpoint_root: Place = Field(
        "",
        description="where checkpoints go, below the run's name; an absolute directory or a URL; empty = run directory",
    )

    @field_validator("checkpoint_root")
    @classmethod
    def _the_same_everywhere(cls, root: str) -> str:
        if root and not root.startswith("/") and "://" not in root:
            raise ValueError("must be an absolute directory or a URL (s3://bucket/prefix)")
        return root


class ObserveSection(Section):
    """What can be watched while the run goes on, and what is written for later."""

    port: Annotated[int, Unit("TCP port")] = Field(
        0,
        ge=0,
        le=65_535,
        description="port of the Prometheus endpoint /metrics; 0 = any free one, written to the run directory",
    )
    bind: Host = Field("127.0.0.1", description="address /metrics listens on; node = the head node's own")
    table: bool = Field(True, description="live table while the run goes on; false = a line a step")
    trace: Annotated[int, Unit("step number")] = Field(
        -1, ge=-1, le=10**9, description="step whose Chrome trace, of all ranks, is written (also --trace); -1 = none"
    )
    tensorboard: bool = Field(False, description="write TensorBoard events beside the records")


class TimeoutSection(Section):
    """How long each wait may last before the run says what it waited for."""

    collective: Seconds = Field(600.0, ge=1, description="longest wait for one collective of the ranks")
    plan: Seconds = Field(300.0, gt=0, description="longest wait for a plan")
    start: Seconds = Field(300.0, gt=0, description="longest time until all workers ask for their first plan")
    actor: Seconds = Field(60.0, gt=0, description="longest wait for any other answer of planner or observer")
    leave: Seconds = Field(180.0, gt=0, description="longest wait of a resize for the step and checkpoint before it")
    nodes: Seconds = Field(1800.0, gt=0, description="longest wait of a run that lost nodes for enough of them")


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
    except OSError as error:
        raise RaypackError(f"cannot read {shown(str(path))}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # also a NUL in the path, and bytes that are no UTF-8
        raise RaypackError(f"cannot read {shown(str(path))}: {error}") from None


def preset_names(kind: Literal["models", "clusters"]) -> list[str]:
    folder = resources.files("raypack.presets").joinpath(kind)
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def preset_or_file(kind: Literal["models", "clusters"], name: str) -> dict[str, Any]:
    """The TOML of a shipped preset, or of a file where `name` ends in .toml."""
    if name.endswith(".toml"):
        return read_toml(name)
    there = preset_names(kind)
    if name not in there:
        meant = did_you_mean(near_miss(name, there), "")
        raise RaypackError(
            f"no {kind[:-1]} preset {shown(name)}: {meant} there are {', '.join(there)}, or give a .toml file"
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
        raise RaypackError(first_fault(error, where, kind)) from None
