"""The dashboard of runs: does it learn, how fast, what crosses the nodes, which rank is late and why."""

from __future__ import annotations

from dashboards.limits import GOODPUT, NO_STEP_SECONDS, RANK_SLOW
from dashboards.panels import (
    COLLECTED,
    EXCHANGED,
    INTER,
    PLANNED,
    Board,
    Row,
    a_step,
    a_step_modelled,
    against_own,
    age,
    by_rank,
    imbalance,
    number,
    quantile,
    sent,
    series,
    speed,
    value,
)

NOW = Row(
    "Now",
    (
        number("Step", "Last recorded step", value("raypack_step"), decimals=0),
        number("Loss", "Mean over the labels of the last applied step", value("raypack_loss"), decimals=4),
        number("Tokens a second", "Each token once", speed("raypack_tokens_total"), "short"),
        number("MFU", "Share of the peak; empty where unknown", value("raypack_mfu_ratio"), "percentunit"),
        number(
            "Since the last step",
            "Grows while nothing moves",
            age("raypack_step_timestamp_seconds"),
            "s",
            0,
            limit=NO_STEP_SECONDS,
        ),
        number("Time left", "At the pace of the last steps", value("raypack_eta_seconds"), "s", 0),
        number("Ranks", "Of the current attempt", value("raypack_world_size"), decimals=0),
        number(
            "Goodput",
            "Share of the time since the run's start that went into steps that count",
            value("raypack_goodput_ratio"),
            "percentunit",
            1,
            limit=GOODPUT,
            low=True,
        ),
        number("Seconds a step", "Measured, mean", a_step("raypack_step_seconds_sum"), "s", 2),
        number("The same, modelled", "Of the run's plans, by the cost model", a_step_modelled("own"), "s", 2),
        number(
            "Static plans, modelled",
            "Seconds of static plans for the same samples over those of the run's plans, both by the cost model",
            against_own("static"),
            "suffix:x",
            2,
        ),
        number(
            "Dynamic plans, modelled",
            "Seconds of dynamic plans for the same samples over those of the run's plans, both by the cost model",
            against_own("dynamic"),
            "suffix:x",
            2,
        ),
    ),
)

LEARNING = Row(
    "Learning",
    (
        series(
            "Loss",
            "Training, and held-out where it is taken",
            (value("raypack_loss"), "{{run}} training"),
            (value("raypack_heldout_loss"), "{{run}} held-out"),
        ),
        series("Gradient norm", "Global, before clipping", (value("raypack_grad_norm"), "{{run}}")),
        series("Learning rate", "Of the last step", (value("raypack_learning_rate"), "{{run}}"), unit="sci"),
    ),
)

SPEED = Row(
    "Speed",
    (
        series(
            "Step time",
            "Of the slowest rank",
            (quantile(0.5), "{{run}} median"),
            (quantile(0.95), "{{run}} p95"),
            (a_step("raypack_step_seconds_sum"), "{{run}} mean"),
            unit="s",
        ),
        series(
            "Seconds a step: measured, and by the cost model",
            "The run's plans measured and modelled; static and dynamic plans for the same samples, modelled",
            (a_step("raypack_step_seconds_sum"), "{{run}} measured"),
            (a_step_modelled("own"), "{{run}} modelled"),
            (a_step_modelled("static"), "{{run}} static, modelled"),
            (a_step_modelled("dynamic"), "{{run}} dynamic, modelled"),
            unit="s",
        ),
        series("MFU", "Of the last step", (value("raypack_mfu_ratio"), "{{run}}"), unit="percentunit"),
        series(
            "Phases: they add up to the step",
            "Of the last step, means over the ranks; waiting = for slower ranks, before gradients are summed. "
            "Of several runs the mean",
            (f"avg by (phase) ({value('raypack_phase_seconds')})", "{{phase}}"),
            unit="s",
            span=12,
            stacked=True,
        ),
        series(
            "Layers by kind: they add up to forward, backward and exchange",
            "Of the last step, means over the ranks, exchanges included. Of several runs the mean",
            (f"avg by (layer, direction) ({value('raypack_layer_seconds')})", "{{layer}} {{direction}}"),
            unit="s",
            span=12,
            stacked=True,
        ),
    ),
)

TRAFFIC = Row(
    "Communication",
    (
        series(
            "Between nodes: this run, and what static and dynamic plans would send",
            "Bytes across nodes that depend on the plan, all ranks together",
            (sent(INTER), "{{run}} sent"),
            (speed(PLANNED, INTER, by="run, policy"), "{{run}} as {{policy}}"),
            unit="Bps",
            span=12,
        ),
        series(
            "Share of exchange bytes that cross nodes",
            "Falls as children stay inside nodes",
            (f"{sent(INTER)} / {sent()}", "{{run}}"),
            unit="percentunit",
            span=12,
        ),
        series(
            "Exchanges by site and scope",
            "Sent to other ranks: forward, backward and replays",
            (speed(EXCHANGED, by="site, scope"), "{{site}} {{scope}}"),
            unit="Bps",
            stacked=True,
        ),
        series(
            "Effective rate of a rank, by site",
            "Bytes sent over the time inside the exchange, waiting for others included; CPU only",
            (f"{speed(EXCHANGED, by='site')} / {speed('raypack_all_to_all_seconds_total', by='site')}", "{{site}}"),
            (f"{speed(COLLECTED, by='op')} / {speed('raypack_collective_seconds_total', by='op')}", "{{op}}"),
            unit="Bps",
        ),
        series(
            "Other collectives",
            "Gradients, parameters, states, keys and values; how each is counted: docs/metrics.md",
            (speed(COLLECTED, by="op, scope"), "{{op}} {{scope}}"),
            unit="Bps",
            stacked=True,
        ),
    ),
)

RANKS = Row(
    "Ranks",
    (
        series(
            "Imbalance",
            "Largest over mean; 1 = even",
            (imbalance("raypack_rank_busy_seconds"), "{{run}} busy seconds"),
            (imbalance("raypack_rank_tokens"), "{{run}} tokens"),
            limit=RANK_SLOW,
            span=6,
        ),
        series(
            "Load of the fullest expert",
            "Over the mean, worst layer; collapsed = every token takes the same experts",
            (value("raypack_expert_load_ratio"), "{{run}}"),
            (value("raypack_expert_load_max_ratio"), "{{run}} collapsed"),
            span=6,
        ),
        series(
            "Busy: the ranks that are so longest",
            "Own computation, last step",
            *by_rank("raypack_rank_busy_seconds"),
            unit="s",
            span=6,
        ),
        series(
            "Waiting: the ranks that wait longest",
            "For other ranks, last step",
            *by_rank("raypack_rank_wait_seconds"),
            unit="s",
            span=6,
        ),
    ),
)

BOARD = Board(
    "raypack-run",
    "raypack run",
    "Learning, speed, MFU, communication by scope, imbalance.",
    (NOW, LEARNING, SPEED, TRAFFIC, RANKS),
    ranks=True,
)
