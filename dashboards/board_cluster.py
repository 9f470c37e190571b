"""The dashboard of the cluster and elasticity: who is there, what was lost and done again, is it safe to lose more."""

from __future__ import annotations

from dashboards.panels import RANK, Board, Row, age, number, series, speed, value

NOW = Row(
    "Now",
    (
        number("Ranks", "Of the current attempt", value("raypack_world_size"), decimals=0),
        number("Nodes", "That ranks reported from", value("raypack_nodes"), decimals=0),
        number("Restarts", "Starts after the first", value("raypack_restarts_total"), decimals=0),
        number("Checkpoint age", "What a failure now would cost", age("raypack_checkpoint_timestamp_seconds"), "s", 0),
        number("Since the last step", "Grows while nothing moves", age("raypack_step_timestamp_seconds"), "s", 0),
        number("Memory", "Peak of the fullest rank", value("raypack_memory_bytes"), "bytes"),
    ),
)

WORLD = Row(
    "Elasticity",
    (
        series(
            "World size",
            "Ranks and nodes",
            (value("raypack_world_size"), "{{run}} ranks"),
            (value("raypack_nodes"), "{{run}} nodes"),
        ),
        series(
            "Events",
            "Counted over the run",
            (value("raypack_restarts_total"), "{{run}} restarts"),
            (value("raypack_steps_skipped_total"), "{{run}} skipped steps"),
            (value("raypack_steps_nonfinite_total"), "{{run}} not finite"),
            (value("raypack_steps_incomplete_total"), "{{run}} incomplete records"),
        ),
        series(
            "Replayed samples",
            "Share of the samples that an earlier attempt had done already",
            (f"{value('raypack_samples_replayed_total')} / {value('raypack_samples_total')}", "{{run}}"),
            unit="percentunit",
        ),
        series(
            "Checkpoint age",
            "Seconds since the last checkpoint, or since the start",
            (age("raypack_checkpoint_timestamp_seconds"), "{{run}}"),
            unit="s",
        ),
        series(
            "Since the last step",
            "A saw-tooth as high as a step is long",
            (age("raypack_step_timestamp_seconds"), "{{run}}"),
            unit="s",
        ),
        series("Step", "Falls back where an attempt replays steps", (value("raypack_step"), "{{run}}")),
    ),
)

MACHINES = Row(
    "Machines",
    (
        series(
            "Busy, by rank",
            "Own computation, last step: one line apart from the others is a slow machine",
            (value("raypack_rank_busy_seconds", RANK), "{{run}} {{rank}}"),
            unit="s",
        ),
        series(
            "Waiting, by rank",
            "For other ranks, last step",
            (value("raypack_rank_wait_seconds", RANK), "{{run}} {{rank}}"),
            unit="s",
        ),
        series("Memory", "Peak of the fullest rank", (value("raypack_memory_bytes"), "{{run}}"), unit="bytes"),
        series(
            "Model FLOP/s",
            "All ranks together, without replays",
            (speed("raypack_model_flops_total"), "{{run}}"),
            unit="flops",
        ),
        series(
            "Documents of an epoch",
            "By what the length rules did",
            (value("raypack_corpus_samples"), "{{run}} {{fate}}"),
            unit="short",
        ),
        series(
            "Observer answers", "1 = the last scrape of a run's endpoint worked", ('up{job="raypack"}', "{{instance}}")
        ),
    ),
)

BOARD = Board(
    "raypack-cluster",
    "raypack cluster",
    "Ranks, nodes, restarts, checkpoints, slow machines.",
    (NOW, WORLD, MACHINES),
    ranks=True,
)
