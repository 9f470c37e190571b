"""The dashboard of runs: does it learn, how fast, what crosses the nodes, which rank is late and why."""

from __future__ import annotations

from dashboards.panels import (
    COLLECTED,
    EXCHANGED,
    INTER,
    PLANNED,
    RANK,
    Board,
    Row,
    a_step,
    age,
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
        number("Since the last step", "Grows while nothing moves", age("raypack_step_timestamp_seconds"), "s", 0),
        number("Ranks", "Of the current attempt", value("raypack_world_size"), decimals=0),
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
            span=6,
        ),
        series("MFU", "Of the last step", (value("raypack_mfu_ratio"), "{{run}}"), unit="percentunit", span=6),
        series(
            "Phases",
            "Of the last step, each on its slowest rank",
            (value("raypack_phase_seconds"), "{{run}} {{phase}}"),
            unit="s",
            span=6,
            stacked=True,
        ),
        series(
            "Layers by kind",
            "Of the last step, exchanges included, each on its slowest rank",
            (value("raypack_layer_seconds"), "{{run}} {{layer}} {{direction}}"),
            unit="s",
            span=6,
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
            (value("raypack_expert_load_ratio"), "{{run}} experts"),
        ),
        series(
            "Busy",
            "Own computation, last step",
            (value("raypack_rank_busy_seconds", RANK), "{{run}} {{rank}}"),
            unit="s",
        ),
        series(
            "Waiting",
            "For other ranks, last step",
            (value("raypack_rank_wait_seconds", RANK), "{{run}} {{rank}}"),
            unit="s",
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
