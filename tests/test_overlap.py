"""What is computed while something is on its way: one rank is held back until the other has computed its part.

Where a gather or a batch of messages blocks, the other rank waits for the one that waits for it, and the test fails.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raypack.exchange.hsap import attention as hsap
from raypack.exchange.hsap import keys as kv_exchange
from raypack.exchange.lasp2 import gather as state_gather
from raypack.layers.linear import module as linear
from raypack.plan.plan import Round
from tests import threads
from tests.hsap_ranks import Case, attend_on_rank
from tests.linear_ranks import attention_on_rank, round_of
from tests.machine import scaled
from tests.test_layout import place


class Marks:
    """What one rank has done, for another one that waits for it."""

    def __init__(self) -> None:
        self._done: set[tuple[str, int]] = set()
        self._changed = threading.Condition()

    def set(self, way: str, number: int = 0) -> None:
        with self._changed:
            self._done.add((way, number))
            self._changed.notify_all()

    def wait(self, way: str, number: int = 0) -> None:
        with self._changed:
            reached = self._changed.wait_for(lambda: (way, number) in self._done, timeout=scaled(10))
        assert reached, f"{way} {number}: the other rank waits for this one before it computes what needs no other"


@pytest.mark.parametrize("kind", ["none", "gate"])
def test_what_is_inside_a_shard_is_computed_while_the_gather_is_in_flight(kind, monkeypatch):
    """Rank 1 joins each gather only when rank 0 has computed the inside of its shard: where the gather blocks, rank 0
    never gets that far."""
    marks, ways = Marks(), iter(["forward", "backward"])
    gather, inside = state_gather.start_gather, linear.inside

    def late_gather(*args: Any) -> Any:
        if dist.get_rank() == 1:
            marks.wait(next(ways))
        return gather(*args)

    def marked_inside(q: torch.Tensor, *args: Any) -> torch.Tensor:
        if dist.get_rank() == 1:
            return inside(q, *args)
        q = q.view_as(q)
        q.register_hook(lambda _: marks.set("backward"))
        out = inside(q, *args)
        marks.set("forward")
        return out

    monkeypatch.setattr(state_gather, "start_gather", late_gather)
    monkeypatch.setattr(linear, "inside", marked_inside)
    threads.run(2, attention_on_rank, (2,), round_of(2, 40), kind, timeout=20)
    assert next(ways, None) is None


def test_keys_of_other_nodes_travel_while_those_that_came_before_are_attended_to(monkeypatch):
    """One document over two nodes of one rank, five rows a message. Rank 0 posts a tick only when rank 1 has attended
    to what the tick before has brought (at the first tick: to its own rows)."""
    marks, ticks = Marks(), []
    exchange, post = hsap.exchange_keys, kv_exchange._Run.post

    def marked_exchange(kv: Any, routes: Any, wire: Any, local: Any, attend: Any, total: Any = None) -> None:
        way = "forward" if total is None else "backward"

        def marked_local() -> None:
            local()
            marks.set(way, 0)

        def marked_attend(leg: Any, keys: Any) -> Any:
            found = attend(leg, keys)
            marks.set(way, leg.tick + 1)
            return found

        watched = dist.get_rank() == 1
        mine = (marked_local, marked_attend) if watched else (local, attend)
        exchange(kv, routes, wire, *mine, total)

    def late_post(run: Any, tick: int) -> Any:
        if dist.get_rank() == 0 and tick <= run.routes.ticks:
            way = "forward" if run.total is None else "backward"
            marks.wait(way, tick)
            ticks.append((way, tick))
        return post(run, tick)

    monkeypatch.setattr(hsap, "exchange_keys", marked_exchange)
    monkeypatch.setattr(kv_exchange._Run, "post", late_post)
    whole = Round((place(0, 28, (0, 2), (0, 1))._replace(attention="hsap"),))
    threads.run(2, attend_on_rank, Case(2, 2, step_rows=5), [whole], (1, 1), timeout=20)
    assert ticks == [(way, tick) for way in ("forward", "backward") for tick in range(5)]
