"""What a layer kind is: one record that planner, clock, bounds, stopwatch, metrics, oracle and pictures ask.

A kind is a folder of this package (or of anybody's: docs/extending.md) with its module, its host plan, its cost and its
one-rank oracle. Everything here is pure: what needs torch is named, and imported by who runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np

from raypack.config import ModelConfig
from raypack.cost.rates import PASSES, Rates
from raypack.exchange.asks import Addition, Ask, Floor
from raypack.exchange.cohorts import Shards
from raypack.plan.topology import Block, Topology


@dataclass(frozen=True)
class Work:
    """FLOPs of one layer besides projections and feed-forward, forward.

    Attributes:
        pair: of one query-key pair over all heads, at the rate of attention.
        token: of one token, at the rate of matrix products.
        overhead: of one token too, but none of the model's: what an implementation adds.
    """

    pair: int = 0
    token: int = 0
    overhead: int = 0


class Costing(Protocol):
    """What a layer of the kind asks of ranks, in the three forms of `exchange.asks`."""

    def ask(self, layer: LayerCost, shards: Shards, recompute: str) -> Ask:
        """Of every rank in a round; launches and latencies of exchanges included."""

    def addition(
        self, layer: LayerCost, topology: Topology, parent: Block, child: Block, attention: str
    ) -> Addition | None:
        """Of one sample on the ranks of the block that the kind computes at; None where it moves and holds nothing."""

    def floor(
        self, layer: LayerCost, topology: Topology, parent: Block, child: Block, attention: str, recompute: str
    ) -> tuple[Floor, float]:
        """Of one sample at least, a pass; and seconds of a step besides, of collectives whatever the length."""

    def calls(self, layer: LayerCost) -> int:
        """Collectives that the ranks of a child of two or more wait for, of a layer and pass; 0 for kinds at the
        parent, whose calls `floor` counts."""


@dataclass(frozen=True, eq=False)
class LayerKind:
    """A kind of layer.

    Attributes:
        letter: in `model.pattern`.
        name: in metrics, records and pictures.
        at: the block that computes it, the samples' parents or their children.
        site: what its exchanges of heads are counted under, `full` or `sparse`; "" where it has none.
        module: `package.module:Class`, built as `Class(config, letter)`; forward(x, frame, wire) takes and returns
            [rows, width].
        oracle: `package.module:function`, called as f(config, parameters of the layer, x [n, width]) -> [n, heads, D]:
            the layer's attention of one document, before the output projection.
        host_plan: `package.module:function`, called as f(around) (`layers.frame.Around`), pure: makes what the module
            reads in `frame.plans[letter]`.
        work: FLOPs of a layer.
        pairs: query-key pairs of documents of these lengths, all heads taken once; integers, shape of the lengths.
        costing: what it asks of ranks.
    """

    letter: str
    name: str
    at: Literal["parent", "child"]
    site: str
    module: str
    oracle: str
    host_plan: str
    work: Callable[[ModelConfig], Work]
    pairs: Callable[[ModelConfig, np.ndarray], np.ndarray]
    costing: Costing


@dataclass(frozen=True, eq=False)
class LayerCost:
    """All layers of one kind of a model on a cluster: the coefficients that judge, search and bounds read.

    Attributes:
        count: layers of the kind.
    """

    kind: LayerKind
    count: int
    rates: Rates

    @cached_property
    def work(self) -> Work:
        return self.kind.work(self.rates.model)

    @cached_property
    def pair_seconds(self) -> float:
        """Forward seconds of one query-key pair over all heads, on one rank."""
        return self.work.pair / self.rates.attention_rate

    def attention_seconds(self, recompute: str) -> float:
        """Seconds of one query-key pair over all heads in one layer, all passes of a step."""
        return PASSES[recompute].attention * self.pair_seconds

    def token_seconds(self, recompute: str) -> float:
        """Seconds of one token in one layer besides projections and feed-forward, all passes of a step."""
        return PASSES[recompute].attention * (self.work.token + self.work.overhead) / self.rates.matmul_rate

    def pairs(self, lengths: np.ndarray) -> np.ndarray:
        """Query-key pairs of each length (float64)."""
        return self.kind.pairs(self.rates.model, lengths).astype(np.float64)


def no_pairs(model: ModelConfig, lengths: np.ndarray) -> np.ndarray:
    """Of kinds whose work is linear in tokens."""
    return np.zeros(np.shape(lengths), dtype=np.int64)
