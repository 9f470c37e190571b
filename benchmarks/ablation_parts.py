"""The parts of policy `joint` that `ablation` takes out, and what it puts in their place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from raypack.plan.table import Table
from raypack.planning.greedy import mix_rounds, stack_rounds
from raypack.planning.problem import Problem

STAGES = ("dynamic_table", "repack_table", "repack_parents_table", "joint_table")
DYNAMIC, REPACK, PARENTS, JOINT = STAGES


@dataclass(frozen=True)
class Part:
    """Something to take out.

    Attributes:
        stages: those whose code it changes.
        swaps: what stands for what, by dotted name below `raypack.planning`.
        watch: functions without a call of which the part has no effect; () = those of `swaps`.
    """

    name: str
    stages: tuple[str, ...]
    swaps: dict[str, Any]
    watch: tuple[str, ...] = ()

    @property
    def watched(self) -> tuple[str, ...]:
        return self.watch or tuple(self.swaps)


def no_search(problem: Problem, table: Table, *_: object, **__: object) -> tuple[Table, float]:
    return table, problem.judge(table)


def given(*arguments: Any) -> Any:
    """The last argument as the answer: what a stage gets from the one before it, or the plan before a search."""
    return arguments[-1]


def only_mix(problem: Problem, lengths: np.ndarray, first: np.ndarray, widths: np.ndarray, _: object) -> np.ndarray:
    return mix_rounds(problem, lengths, first, widths)


def only_stack(problem: Problem, lengths: np.ndarray, first: np.ndarray, widths: np.ndarray) -> np.ndarray:
    return stack_rounds(problem, lengths, first, widths, np.zeros(problem.topology.world, dtype=np.int64))


def one_least_width(rounds: Iterable[int], stretches: Iterable[float], _: Iterable[int]) -> product[Any]:
    return product(rounds, stretches, (0,))


def no_places(_: object, samples: list[int], *__: object) -> list[int]:
    return samples


SEARCHES = tuple(f"{module}.refine" for module in ("uniform", "repack", "joint"))
PARTS = (
    Part("few + exact (refine instead)", (JOINT,), {"joint.is_few": lambda _: False}, ("joint.improve_few",)),
    Part("few + exact (nothing instead)", (JOINT,), {"joint.improve_few": given}),
    Part("lockstep", (JOINT,), {"joint.balanced_tables": lambda _: []}),
    Part("lockstep: one width", (JOINT,), {"lockstep.FULL_SHARES": (4.0,)}, ("joint.balanced_tables",)),
    Part("fill", (JOINT,), {"joint.fill": no_places, "joint.LIFTS": (0.0,)}, ("joint.fill",)),
    Part("fill: one lift", (JOINT,), {"joint.LIFTS": (0.01,)}, ("joint.fill",)),
    Part("share", (JOINT,), {"joint.share": no_places}),
    Part("construct", (JOINT,), {"joint.construct": lambda _: []}, ("joint.place_wide",)),
    Part("search of joint", (JOINT,), {"joint.refine": no_search}),
    Part("joint, all of it", (JOINT,), {"policies.joint_table": lambda problem, bases: min(bases, key=problem.judge)}),
    Part("repack+parents, all of it", (PARENTS,), {"policies.repack_parents_table": given}),
    Part("searches of repack, repack+parents", STAGES[1:3], {"repack.refine": no_search}),
    Part("repack: one stretch", (REPACK, PARENTS), {"repack.STRETCHES": (1.0,)}, ("repack.with_children",)),
    Part("repack, all of it", (REPACK,), {"policies.repack_table": given}),
    Part("repack and repack+parents", STAGES[1:3], dict.fromkeys([f"policies.{name}" for name in STAGES[1:3]], given)),
    Part("search of dynamic", (DYNAMIC,), {"uniform.refine": no_search}),
    Part("searches but that of joint", STAGES[:3], dict.fromkeys(SEARCHES[:2], no_search)),
    Part("every search", STAGES, {**dict.fromkeys(SEARCHES, no_search), "joint.improve_few": given}, SEARCHES),
    Part("several starts of a search", STAGES, {"search.improve.STARTS": 1, "search.improve.FEW_STARTS": 1}, SEARCHES),
    Part("dynamic: one stretch", (DYNAMIC,), {"uniform.STRETCHES": (1.0,)}, ("uniform.list_schedule",)),
    Part("dynamic: several least widths", (DYNAMIC,), {"uniform.product": one_least_width}),
    Part("stack_rounds beside mix_rounds", (DYNAMIC,), {"uniform.stack_rounds": only_mix}, ("uniform.mix_rounds",)),
    Part("mix_rounds beside stack_rounds", (DYNAMIC,), {"uniform.mix_rounds": only_stack}),
    Part("dynamic as with many samples", (DYNAMIC,), {"uniform.few_samples": lambda _: False}, SEARCHES[:1]),
    Part("several numbers of rounds", (DYNAMIC, JOINT), {"uniform.MORE_ROUNDS": 1}, ("uniform.round_counts",)),
    Part("even_out", STAGES, {"greedy.even_out": lambda *_: None}),
)  # fmt: skip
