"""The same question to every node of the Ray cluster: paths and storage that all must see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypack.errors import RaypackError


def ask_each_node(question: Callable[..., Any], *arguments: Any, timeout: float) -> Iterator[tuple[str, Any]]:
    """Run `question(*arguments)` on each living node, on all at once; yields (node's address, answer).

    Raises:
        RaypackError: a node does not answer within `timeout` seconds.
    """
    remote = ray.remote(num_cpus=0)(question)
    asked = [
        (
            node["NodeManagerAddress"],
            remote.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(*arguments),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]  # fmt: skip
    for name, answer in asked:
        try:
            yield name, ray.get(answer, timeout=timeout)
        except ray.exceptions.RayError as error:
            reason = str(error).splitlines()[0]
            raise RaypackError(f"node {name} did not answer within timeouts.actor = {timeout:g} s: {reason}") from None
