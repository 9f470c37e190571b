"""One tree of frozen settings. A TOML run file is laid over the defaults, `--section.key value` over the file.

Every value is checked on construction; an unknown key is an error. A number's type says its unit (`units`);
descriptions are what `--help` and docs/run-file.md show: up to the first ";" a line of the short help.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from raypack.config.model import ModelConfig
from raypack.config.units import (
    Directory,
    DirectoryName,
    Host,
    Location,
    Named,
    NameList,
    Plain,
    Ranks,
    RanksOfNodes,
    Seconds,
    Section,
    Seed,
    Share,
    Steps,
    Tokens,
    Unit,
)
from raypack.plan.names import KERNELS, POLICIES, SINKS, AttentionChoice, Recompute, Sync


class RunSection(Section):
    """What the run is called, where it writes, how long it lasts and how it goes on after an end."""

    name: DirectoryName = Field(
        "", description="its directory below run.root; empty = the run file's name and the time"
    )
    root: Directory = Field("runs", min_length=1, description="directory of all runs")
    steps: Steps = Field(60, ge=1, description="optimizer steps of the whole run")
    seed: Seed = Field(0, description="where the random first weights start from")
    resume: Location = Field(
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
    ray_address: Location = Field(
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

    policy: Annotated[str, Named(POLICIES)] = Field(
        "joint",
        description="how samples get ranks; static one width for all, dynamic one per sample, repack and "
        "repack+parents children inside nodes, joint parent and child of each sample together; package.module:object "
        "one of your own",
    )
    cluster: Location = Field("local-2x4", description="cluster preset or .toml file with the cost model's rates")
    sync: Literal["", Sync] = Field(
        "", description="where the cost model lets ranks wait for each other; empty = what the cluster says"
    )
    rank_tokens_max: Tokens = Field(0, ge=0, description="most tokens of a rank in a round; 0 = what the cluster says")
    look_ahead: Steps = Field(2, ge=1, le=1000, description="steps planned before they are asked for")
    budget: Annotated[int, Unit("evaluations")] = Field(
        2000, ge=0, le=10**6, description="plans that local search tries for a step; 0 = plain greedy"
    )
    attention: AttentionChoice = Field(
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
    kernel: Annotated[str, Named(KERNELS)] = Field(
        "auto",
        description="what computes attention on a rank; auto the best for device and number type, exact plain torch, "
        "package.module:object one of your own; hsap across nodes has its own",
    )
    shard: Literal["none", "world"] = Field(
        "none", description="where parameters live; none = all on every rank, world = split over all ranks (FSDP2)"
    )
    recompute: Recompute = Field(
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
    checkpoint_root: Location = Field(
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
    tensorboard: bool = Field(False, description="write TensorBoard events beside the records; a sink like the others")
    sinks: Annotated[NameList, Named(SINKS)] = Field(
        (),
        description="where step records go too; wandb Weights & Biases, mlflow MLflow, package.module:object one of "
        "your own",
    )

    @property
    def all_sinks(self) -> tuple[str, ...]:
        """Each once, in the order given."""
        return tuple(dict.fromkeys([*(["tensorboard"] if self.tensorboard else []), *self.sinks]))


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
