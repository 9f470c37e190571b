"""The mutants of `make mutants`: a wrong edit that could be made by mistake, and the test that must then fail.

Where a file changes under one, write the same mistake anew; where that makes no sense any more, find another.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """
    Attributes:
        name: on the command line and in the table.
        file: below the repository's root.
        old: text that occurs in it exactly once.
        new: what stands there instead.
        breaks: what is wrong then, in a few words.
        test: pytest's name of one test, quick by itself.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    test: str


WORLDS = "tests/test_small_worlds.py::test_a_step_is_that_of_one_rank_and_sends_what_the_cost_model_says"

MUTANTS = (
    # -- exchanges and layouts
    Mutant(
        name="kv-copies-overwritten",
        file="raypack/exchange/heads/run.py",
        old="first : first + move.heads] += received[i]",
        new="first : first + move.heads] = received[i]",
        breaks="gradients of a KV head's copies: the last rank's instead of the sum",
        test=f"{WORLDS}[heads]",
    ),
    Mutant(
        name="kv-copies-summed-narrow",
        file="raypack/exchange/heads/run.py",
        old="wide = torch.promote_types(x.dtype, torch.float32)\n        total",
        new="wide = x.dtype\n        total",
        breaks="the same sum in the model's dtype",
        test="tests/test_exchange.py::test_copies_of_a_kv_head_are_summed_in_fp32_and_in_rank_order",
    ),
    Mutant(
        name="positions-restart",
        file="raypack/exchange/layout.py",
        old="np.repeat(self.low - starts, sizes)",
        new="np.repeat(-starts, sizes)",
        breaks="positions count from the shard, not from the document",
        test="tests/test_layout.py::test_positions_do_not_restart_at_the_shard_edge",
    ),
    # -- halos and states of linear layers
    Mutant(
        name="halo-short-by-one",
        file="raypack/exchange/halo/plan.py",
        old="low - taps + 1), low",
        new="low - taps + 2), low",
        breaks="the convolution's first tap is missing at borders",
        test=f"{WORLDS}[gated]",
    ),
    Mutant(
        name="halo-over-documents",
        file="raypack/exchange/halo/plan.py",
        old="max(int(stream.starts[stream.document(low)]), low - taps + 1)",
        new="max(0, low - taps + 1)",
        breaks="the convolution sees the document before",
        test=f"{WORLDS}[gated]",
    ),
    Mutant(
        name="state-leaks",
        file="raypack/exchange/lasp2/states.py",
        old="before = range(stream.holder(start), i)",
        new="before = range(0, i)",
        breaks="states of other documents enter a shard",
        test=f"{WORLDS}[decayed]",
    ),
    Mutant(
        name="state-decay-one-rank-off",
        file="raypack/exchange/lasp2/gather.py",
        old="between[:-1] = logs[1:].flip",
        new="between[:-1] = logs[:-1].flip",
        breaks="states decay by the tokens of the wrong ranks",
        test=f"{WORLDS}[decayed]",
    ),
    Mutant(
        name="gather-blocks",
        file="raypack/comm/collect.py",
        old="    assert work is not None\n",
        new="    work.wait()\n",
        breaks="nothing is computed while states are on their way",
        test="tests/test_overlap.py::test_what_is_inside_a_shard_is_computed_while_the_gather_is_in_flight[none]",
    ),
    # -- hsap and gathered keys
    Mutant(
        name="merge-by-maximum",
        file="raypack/kernels/partial.py",
        old="torch.logaddexp(lse, part.lse.to(lse.dtype))",
        new="torch.maximum(lse, part.lse.to(lse.dtype))",
        breaks="partial outputs are merged by their larger log-sum-exp",
        test=f"{WORLDS}[hsap-sharers]",
    ),
    Mutant(
        name="returned-keys-overwritten",
        file="raypack/exchange/hsap/keys.py",
        old="self.total[a:b] += back",
        new="self.total[a:b] = back",
        breaks="gradients of keys that another node used, in place of the sum",
        test=f"{WORLDS}[hsap-sharers]",
    ),
    Mutant(
        name="uneven-heads-overwritten",
        file="raypack/exchange/hsap/attention.py",
        old="into[:, j] += grads[0, :, i]",
        new="into[:, j] = grads[0, :, i]",
        breaks="a KV head gets the gradient of its last query head only",
        test=f"{WORLDS}[hsap-uneven]",
    ),
    Mutant(
        name="keys-block",
        file="raypack/exchange/hsap/keys.py",
        old="works = run.post(tick)\n",
        new="works = run.post(tick)\n            [work.wait() for work in works]\n",
        breaks="nothing is computed while keys are on their way",
        test="tests/test_overlap.py::test_keys_of_other_nodes_travel_while_those_that_came_before_are_attended_to",
    ),
    Mutant(
        name="gathered-gradients-lost",
        file="raypack/exchange/gathered/keys.py",
        old="total = total + part[: plan.rows]",
        new="total = part[: plan.rows]",
        breaks="gradients of gathered keys: those of the last rank alone",
        test=f"{WORLDS}[gathered]",
    ),
    Mutant(
        name="f-exchange-for-s-layers",
        file="raypack/layers/window/host_plan.py",
        old=' and cohort.attention == "ulysses"',
        new="",
        breaks="S layers run through F's hsap, without their window",
        test=f"{WORLDS}[hsap-sharers]",
    ),
    # -- kernels
    Mutant(
        name="window-too-long",
        file="raypack/kernels/exact.py",
        old="device=device) - (window - 1))",
        new="device=device) - window)",
        breaks="a window of n + 1 tokens",
        test="tests/test_model_kernels.py::test_window_of_four_at_position_five_sees_keys_two_to_five",
    ),
    Mutant(
        name="sinks-of-the-stream",
        file="raypack/kernels/exact.py",
        old="(key >= start) & (key < start + self.sinks)",
        new="key < self.sinks",
        breaks="short documents see the sinks of the first one",
        test="tests/test_model_kernels.py::test_sinks_equal_oracle_in_fp64",
    ),
    Mutant(
        name="full-layers-windowed",
        file="raypack/layers/full/module.py",
        old="attention(q, k, v, by_heads.packings[number], ",
        new="attention(q, k, v, by_heads.packings[number], window=self.config.window, ",
        breaks="F layers have a window",
        test=f"{WORLDS}[heads]",
    ),
    # -- router
    Mutant(
        name="ties-anywhere",
        file="raypack/model/moe.py",
        old="torch.sort(scores.detach() + bias, dim=-1, descending=True, stable=True).indices[:, :active]",
        new="torch.topk(scores.detach() + bias, active).indices",
        breaks="equal scores go to any expert",
        test="tests/test_model_moe.py::test_ties_go_to_the_lowest_expert",
    ),
    Mutant(
        name="bias-weighs",
        file="raypack/model/moe.py",
        old="chosen = scores.gather(1, routing.experts)",
        new="chosen = (scores + self.bias).gather(1, routing.experts)",
        breaks="the bias enters the gates",
        test="tests/test_model_moe.py::test_moe_equals_the_loop_over_tokens[7-0-0]",
    ),
    Mutant(
        name="bias-of-one-round",
        file="raypack/training/step.py",
        old="torch.stack(rounds).sum(0)",
        new="torch.stack(rounds)[0]",
        breaks="the router's bias follows one round of the step",
        test="tests/test_small_steps.py::test_a_step_moves_the_routers_bias_by_the_tokens_of_all_ranks_and_rounds",
    ),
    # -- loss and step
    Mutant(
        name="divisor-of-tokens",
        file="raypack/training/step.py",
        old="divisor = work.plan.labels",
        new="divisor = work.plan.tokens",
        breaks="the loss is divided by tokens, not by labels",
        test=f"{WORLDS}[heads]",
    ),
    Mutant(
        name="mean-over-ranks",
        file="raypack/training/parameters.py",
        old="module.set_gradient_divide_factor(1.0)",
        new="module.set_gradient_divide_factor(2.0)",
        breaks="sharded gradients are divided again",
        test=f"{WORLDS}[sharded]",
    ),
    Mutant(
        name="rounds-overwrite",
        file="raypack/training/parameters.py",
        old=" if master.grad is None else master.grad.add_(used.grad)",
        new="",
        breaks="bf16: gradients of the last round alone",
        test="tests/test_small_worlds.py::test_in_bf16_every_gradient_and_what_every_layer_adds_stay_near_fp64[heads]",
    ),
    Mutant(
        name="narrow-masters",
        file="raypack/training/parameters.py",
        old="    return torch.promote_types(dtype, torch.float32)",
        new="    return dtype",
        breaks="masters are bf16: small steps are lost",
        test="tests/test_small_steps.py::test_a_bf16_model_trains_fp32_masters_and_computes_with_them[none]",
    ),
    Mutant(
        name="clip-off",
        file="raypack/training/parameters.py",
        old="    if limit:\n",
        new="    if not limit:\n",
        breaks="gradients are never clipped",
        test="tests/test_small_steps.py::test_steps_are_those_of_a_plain_loop_with_adamw[none]",
    ),
    Mutant(
        name="nan-applied",
        file="raypack/training/step.py",
        old="applied = bool(torch.isfinite(norm)) and math.isfinite(mean)",
        new="applied = True",
        breaks="a step with NaN is not skipped",
        test="tests/test_small_steps.py::test_a_loss_that_is_not_finite_is_skipped_by_all_ranks_alike[none]",
    ),
    # -- stream and cost model
    Mutant(
        name="full-step-cut-short",
        file="raypack/data/stream.py",
        old='side="right"',
        new='side="left"',
        breaks="a sample that just fits waits for the next step",
        test="tests/test_data_stream.py::test_resume_continues_with_the_next_samples_whoever_asks",
    ),
    Mutant(
        name="exchange-of-the-quicker-side",
        file="raypack/exchange/asks.py",
        old="inter = np.maximum(out_inter, in_inter)",
        new="inter = np.minimum(out_inter, in_inter)",
        breaks="an exchange takes what its quicker side takes",
        test="tests/test_planning_cost.py::test_a_full_layer_sends_only_through_the_childs_links",
    ),
    Mutant(
        name="pack-starts-early",
        file="raypack/planning/clock.py",
        old="end = interval_max(clock, packs.first, packs.end) + packs.seconds",
        new="end = clock[packs.first] + packs.seconds",
        breaks="a pack waits for its first rank only",
        test="tests/test_planning_cost.py::test_a_pack_starts_when_the_last_of_its_ranks_has_left_the_round_before",
    ),
    Mutant(
        name="bound-too-high",
        file="raypack/planning/bounds.py",
        old="np.maximum(at, start), total / ranks)",
        new="np.maximum(at, start), total / max(1, ranks - 1))",
        breaks="the certified bound lies above legal plans",
        test="tests/test_planning_evaluate.py::test_least_time_is_the_first_time_at_which_the_areas_fit",
    ),
    # -- parts from outside
    Mutant(
        name="foreign-plan-unchecked",
        file="raypack/planning/policies.py",
        old="check_plan(table.to_plan(problem.topology, name))",
        new="table.to_plan(problem.topology, name)",
        breaks="a policy from outside puts samples on ranks that are no block",
        test="tests/test_registry.py::test_what_a_foreign_policy_does_wrong_is_one_line",
    ),
    Mutant(
        name="kernel-of-the-settings-forgotten",
        file="raypack/training/parameters.py",
        old="made.model.use_kernel(kernel)",
        new="pass",
        breaks="train.kernel is checked, and another kernel computes",
        test="tests/test_registry.py::test_every_softmax_layer_of_a_run_gets_the_kernel_of_its_settings",
    ),
    Mutant(
        name="sink-waited-for",
        file="raypack/observe/sinks.py",
        old="self._thread.join(max(0.0, until - time.monotonic()))",
        new="self._thread.join()",
        breaks="a sink that hangs holds up the end of the run",
        test="tests/test_sinks.py::test_a_sink_that_fails_or_hangs_stops_neither_the_run_nor_another",
    ),
)
