"""Ranks, nodes and legal blocks (docs/exchange.md): a small integer grid, pure. `comm.wire` makes communicators.

Ranks are contiguous per node. A *block* is `(first, width)`, consecutive ranks:

- inside a node: a power of two, `first` a multiple of it counted from the node's first rank, or the whole node;
- across nodes: an aligned power of two of whole nodes, or the whole world.

Blocks are laminar: any two are nested or disjoint. This holds for unequal nodes and odd worlds too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from raypack.errors import RaypackError

WORLD_MAX = 1 << 16
"""Ranks: several times the largest cluster there is; more is a slip of the pen that would list blocks for minutes."""


class Block(NamedTuple):
    """`width` consecutive ranks starting at `first`."""

    first: int
    width: int

    @property
    def end(self) -> int:
        """One past the last rank."""
        return self.first + self.width

    def holds(self, rank: int) -> bool:
        return self.first <= rank < self.first + self.width

    def contains(self, other: Block) -> bool:
        return self.first <= other.first and other.first + other.width <= self.first + self.width

    def overlaps(self, other: Block) -> bool:
        return self.first < other.first + other.width and other.first < self.first + self.width

    def __str__(self) -> str:
        return f"[{self.first}, {self.width}]"


@dataclass(frozen=True)
class Topology:
    """Number of ranks of each node, in rank order.

    Raises:
        RaypackError: no node, or a node without a rank.
    """

    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(int(n) for n in self.nodes))
        if not self.nodes or min(self.nodes) < 1:
            raise RaypackError(f"topology nodes = {list(self.nodes)}: each node needs at least one rank")
        _check_world(sum(self.nodes))

    @classmethod
    def regular(cls, ranks: int, ranks_per_node: int) -> Topology:
        """`ranks` on nodes of `ranks_per_node`; the last node may be smaller."""
        if ranks < 1 or ranks_per_node < 1:
            raise RaypackError(f"ranks = {ranks}, ranks_per_node = {ranks_per_node}: both must be at least 1")
        _check_world(ranks)
        full, rest = divmod(ranks, ranks_per_node)
        return cls((ranks_per_node,) * full + ((rest,) if rest else ()))

    @cached_property
    def world(self) -> int:
        return sum(self.nodes)

    @cached_property
    def node_firsts(self) -> tuple[int, ...]:
        """First rank of each node."""
        firsts, at = [], 0
        for size in self.nodes:
            firsts.append(at)
            at += size
        return tuple(firsts)

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """Node index of each rank."""
        return tuple(node for node, size in enumerate(self.nodes) for _ in range(size))

    def node_block(self, node: int) -> Block:
        return Block(self.node_firsts[node], self.nodes[node])

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Every legal block, width descending, then first ascending (single ranks included)."""
        found = {Block(0, self.world)}
        for node, size in enumerate(self.nodes):
            start = self.node_firsts[node]
            found.add(Block(start, size))
            width = 1
            while width <= size:
                found.update(Block(start + at, width) for at in range(0, size - width + 1, width))
                width *= 2
        count = 2
        while count <= len(self.nodes):
            for at in range(0, len(self.nodes) - count + 1, count):
                found.add(Block(self.node_firsts[at], sum(self.nodes[at : at + count])))
            count *= 2
        return tuple(sorted(found, key=lambda b: (-b.width, b.first)))

    @cached_property
    def _block_set(self) -> frozenset[Block]:
        return frozenset(self.blocks)

    @cached_property
    def group_blocks(self) -> tuple[Block, ...]:
        """The blocks that get a communicator: those of two or more ranks."""
        return tuple(b for b in self.blocks if b.width > 1)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The distinct legal widths, ascending."""
        return tuple(sorted({b.width for b in self.blocks}))

    def blocks_of_width(self, width: int) -> tuple[Block, ...]:
        return self._by_width.get(width, ())

    @cached_property
    def _by_width(self) -> dict[int, tuple[Block, ...]]:
        table: dict[int, list[Block]] = {}
        for block in self.blocks:
            table.setdefault(block.width, []).append(block)
        return {width: tuple(blocks) for width, blocks in table.items()}

    def is_block(self, block: Block) -> bool:
        return block in self._block_set

    def in_one_node(self, block: Block) -> bool:
        return self.node_of[block.first] == self.node_of[block.end - 1]

    def node_sizes(self, block: Block) -> tuple[int, ...]:
        """Ranks of `block` on each of the nodes it touches."""
        first, last = self.node_of[block.first], self.node_of[block.end - 1]
        if first == last:
            return (block.width,)
        return self.nodes[first : last + 1]

    def blocks_around(self, rank: int) -> tuple[Block, ...]:
        """The legal blocks that hold `rank`, widest first: a chain, since blocks are laminar."""
        return tuple(b for b in self.blocks if b.holds(rank))


def _check_world(ranks: int) -> None:
    if ranks > WORLD_MAX:
        raise RaypackError(f"ranks = {ranks}: a world has at most {WORLD_MAX}; give fewer")
