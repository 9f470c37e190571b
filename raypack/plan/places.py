"""From where the workers run to the topology: ranks must be contiguous per node (docs/exchange.md)."""

from __future__ import annotations

from collections.abc import Sequence

from raypack.errors import RaypackError
from raypack.plan.topology import Topology


def topology_of(places: Sequence[tuple[str, int]]) -> Topology:
    """The topology of ranks 0, 1, ... at `places` = (node, local rank).

    Node-local children need a node's ranks side by side: node names are compared, never addresses or rank arithmetic.

    Raises:
        RaypackError: a node's ranks are not contiguous, or not in the order of their local ranks.
    """
    nodes: list[str] = []
    sizes: list[int] = []
    last = -1
    for rank, (node, local) in enumerate(places):
        if not nodes or nodes[-1] != node:
            if node in nodes:
                raise RaypackError(
                    f"rank {rank} is on node {node} like rank {sum(sizes[: nodes.index(node)])}, with ranks of node "
                    f"{nodes[-1]} between them: ranks must be contiguous per node; order workers by node, then by GPU"
                )
            nodes.append(node)
            sizes.append(0)
        elif local <= last:
            raise RaypackError(
                f"rank {rank} has local rank {local} on node {node}, after {last}: "
                "order the workers of a node by their local rank"
            )
        sizes[-1] += 1
        last = local
    return Topology(tuple(sizes))
