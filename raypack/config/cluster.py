"""The machines as settings: what the cost model knows of them."""

from __future__ import annotations

from pydantic import Field

from raypack.config.units import (
    BytesPerSecond,
    FlopsPerSecond,
    Layers,
    Nodes,
    Ranks,
    Seconds,
    Section,
    Share,
    Title,
    Tokens,
)
from raypack.plan.names import Sync


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
    sync: Sync = Field("step", description="where ranks wait for each other")
    prefetch_layers: Layers = Field(1, ge=0, description="layers of slack that parameter prefetch gives sync = layer")
