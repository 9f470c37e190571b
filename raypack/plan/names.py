"""The closed lists of names that plans, flags, metrics and records share. Each stands here and nowhere else."""

from __future__ import annotations

from typing import Literal, get_args

Attention = Literal["ulysses", "kv_gather", "hsap"]
ATTENTIONS: tuple[str, ...] = get_args(Attention)
"""How a placement's full attention meets across ranks: heads exchanged, keys and values gathered, spread over nodes."""
ULYSSES, KV_GATHER, HSAP = range(len(ATTENTIONS))
AttentionChoice = Literal["auto", Attention]
"""What a planner may be told; auto takes the cheapest."""

POLICIES = ("static", "dynamic", "repack", "repack+parents", "joint")
"""How a plan is made; each may return what the one before it found."""

KERNELS = ("auto", "exact", "flash_attn", "torch_varlen", "flex")
"""What computes attention on a rank; auto takes the best for the device and the number type."""

SINKS = ("tensorboard", "wandb", "mlflow")
"""Where step records go besides the run directory and /metrics."""

Recompute = Literal["none", "selective", "full"]
RECOMPUTES: tuple[str, ...] = get_args(Recompute)
"""What backward computes again: nothing, the feed-forward part, or whole layers with their exchanges."""

LAYER_KINDS = {"F": "full", "S": "sparse", "L": "linear"}
"""Shipped layer kinds by the letter of a model's pattern: what metrics, records and pictures call them."""
OTHER_KIND = "other"
"""What all kinds of anybody's own are called there."""

Sync = Literal["step", "layer", "node"]
SYNCS: tuple[str, ...] = get_args(Sync)
"""Where ranks wait for each other."""

SCOPES = ("intra", "inter")
"""Bytes inside a node, and between nodes."""

EXCHANGE_SITES = ("full_in", "full_out", "kv_exchange", "sparse_in", "sparse_out")
"""Where exchanges send tokens, heads or keys to other ranks."""

COLLECTIVES = (
    "gradient_reduce",
    "parameter_gather",
    "metric_reduce",
    "state_gather",
    "conv_halo",
    "kv_gather",
)
"""All other collectives that are counted."""

PLANNED_SITES = ("full_in", "full_out", "kv_exchange", "kv_gather", "sparse_in", "sparse_out", "state_gather")
"""What the cost model counts bytes for."""
