"""What a rank tells the observer after a step."""

from __future__ import annotations

import resource
import socket
from dataclasses import dataclass

import torch

from raypack.observe.record import RankReport, StepFacts, ids_digest
from raypack.plan.plan import Plan
from raypack.plan.topology import Topology
from raypack.planning.steps import PlannedStep
from raypack.training.feed import Fed
from raypack.training.step import StepResult, Trainer


@dataclass(frozen=True)
class Reports:
    """Makes one rank's reports. `peak_flops` = FLOP/s of one rank, the denominator of MFU; `peak_source` names it."""

    trainer: Trainer
    topology: Topology
    rank: int
    peak_flops: float
    peak_source: str

    def make(self, fed: Fed, result: StepResult, seconds: float, heldout_loss: float | None) -> RankReport:
        """The report of the step just run, whose bytes are taken out of the ledger; `seconds` = from asking for the
        step to its end."""
        planned, work = fed.planned, fed.work
        assert planned is not None
        assert work is not None
        ledger = self.trainer.wire.ledger.take()
        phases = dict(result.phases, plan_wait=fed.wait_seconds)
        evaluate, checkpoint = phases.pop("evaluate", None), phases.pop("checkpoint", None)
        waiting = sum(ledger.seconds.values()) + sum(result.phases.get(p, 0.0) for p in ("agree", "gradient_reduce"))
        return RankReport(
            rank=self.rank,
            node=self.topology.node_of[self.rank],
            world=self.topology.world,
            attempt=self.trainer.attempt,
            step=work.plan.step,
            tokens=work.rank_tokens,
            seconds=seconds,
            busy_seconds=max(0.0, seconds - waiting - fed.wait_seconds),
            wait_seconds=waiting,
            plan_wait_seconds=fed.wait_seconds,
            exchanged=ledger.exchanged,
            collected=ledger.collected,
            phases=phases,
            layers=result.layers,
            # A GPU's exchanges run beside the host: its clock sees only their launch.
            exchange_seconds=dict(ledger.seconds) if self.trainer.device.type == "cpu" else {},
            memory_bytes=_memory(self.trainer.device),
            prepare_seconds=fed.prepare_seconds,
            evaluate_seconds=evaluate,
            checkpoint_seconds=checkpoint,
            host=socket.gethostname(),
            facts=self._facts(planned, work.plan, result, heldout_loss) if self.rank == 0 else None,
        )

    def _facts(self, planned: PlannedStep, plan: Plan, result: StepResult, heldout_loss: float | None) -> StepFacts:
        assert plan.before is not None
        model = self.trainer.parameters.model.config
        return StepFacts(
            epoch=plan.before.epoch,
            first_sample=plan.before.next_sample,
            sample_count=sum(len(r.placements) for r in plan.rounds),
            tokens=plan.tokens,
            labels=plan.labels,
            rounds=len(plan.rounds),
            policy=plan.policy,
            loss=result.loss,
            grad_norm=result.grad_norm,
            model_flops=planned.model_flops,
            sample_ids_digest=ids_digest(p.sample for p in plan.placements),
            plan_seconds=planned.plan_seconds,
            plan_bound_ratio=planned.bound_ratio,
            peak_flops=self.peak_flops,
            peak_source=self.peak_source,
            plan_step_seconds=planned.plan_step_seconds,
            static_step_seconds=planned.static_step_seconds,
            dynamic_step_seconds=planned.dynamic_step_seconds,
            bytes_static=planned.bytes_static,
            bytes_dynamic=planned.bytes_dynamic,
            parent_widths=planned.parent_widths,
            child_widths=planned.child_widths,
            learning_rate=result.lr,
            heldout_loss=heldout_loss,
            expert_load=result.expert_load or None,
            expert_load_max=model.experts / model.experts_active if result.expert_load else None,
            applied=result.applied,
        )


def _memory(device: torch.device) -> int:
    """Bytes: the most that was allocated on a GPU, the largest resident set of a CPU process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
