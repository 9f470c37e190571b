"""What was really sent, in bytes, by site and scope (docs/metrics.md)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from raypack.plan.topology import Block, Topology


@dataclass
class Ledger:
    """Counters of one rank.

    `exchanged[(site, scope)]` = bytes of exchanges sent to *other* ranks, forward, backward and replays alike:
    all-to-alls, and the point-to-point calls of hsap (`kv_exchange`).
    `collected[(op, scope)]` = bytes of all other collectives: `state_gather`, `kv_gather` and `conv_halo` as copies to
    each other rank (`count_copies`), the rest by the ring formula of `count_ring`.
    `seconds[site]` = wall time inside the exchanges where the device is a CPU (a GPU's run asynchronously).
    """

    topology: Topology
    rank: int
    exchanged: Counter[tuple[str, str]] = field(default_factory=Counter)
    collected: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def count_exchange(self, site: str, block: Block, vectors: Sequence[int], vector_bytes: int) -> None:
        """`vectors[i]` vectors of `vector_bytes` go to rank `block.first + i`."""
        node_of, here = self.topology.node_of, self.topology.node_of[self.rank]
        sent = {"intra": 0, "inter": 0}
        for i, count in enumerate(vectors):
            if count and block.first + i != self.rank:
                sent["intra" if node_of[block.first + i] == here else "inter"] += count
        for scope, count in sent.items():
            self.exchanged[site, scope] += count * vector_bytes

    def count_ring(self, op: str, block: Block, passes: float, size: int) -> None:
        """A ring collective over `block`: `passes` * (w - 1) / w * `size` bytes go to the next rank of the ring.

        `size` is the whole buffer in bytes: an all-reduce makes 2 passes, a gather or a reduce-scatter 1.
        """
        if block.width < 2:
            return
        following = block.first + (self.rank - block.first + 1) % block.width
        scope = "intra" if self.topology.node_of[following] == self.topology.node_of[self.rank] else "inter"
        self.collected[op, scope] += round(passes * size * (block.width - 1) / block.width)

    def count_copies(self, op: str, block: Block, sizes: Sequence[int]) -> None:
        """`sizes[i]` bytes go straight to rank `block.first + i`, this rank's own entry left out."""
        node_of, here = self.topology.node_of, self.topology.node_of[self.rank]
        for i, size in enumerate(sizes):
            if size and block.first + i != self.rank:
                self.collected[op, "intra" if node_of[block.first + i] == here else "inter"] += size

    def take(self) -> Ledger:
        """The counters so far, as a record of their own; this one starts again at zero."""
        taken = Ledger(self.topology, self.rank, self.exchanged, self.collected, self.seconds)
        self.exchanged, self.collected, self.seconds = Counter(), Counter(), defaultdict(float)
        return taken
