"""The dashboard of the cluster and elasticity: who is there, what was lost and done again, is it safe to lose more."""

from __future__ import annotations

from dashboards.limits import CHECKPOINT_AGE_SECONDS, GOODPUT, NO_STEP_SECONDS
from dashboards.panels import Board, Panel, Query, Row, age, by_rank, number, series, speed, value

STEPS = speed("raypack_step_seconds_sum")
SAVING = speed("raypack_checkpoint_seconds_total")
EVALUATING = speed("raypack_evaluate_seconds_total")
# Of the last hour, or of all time where the run is younger.
LATELY = (
    f"clamp_min(delta({value('raypack_effective_seconds')}[1h])"
    f" / clamp_max({age('raypack_start_timestamp_seconds')}, 3600), 0)"
)

NOW = Row(
    "Now",
    (
        number("Ranks", "Of the current attempt", value("raypack_world_size"), decimals=0),
        number("Nodes", "That ranks reported from", value("raypack_nodes"), decimals=0),
        number("Restarts", "Starts after the first", value("raypack_restarts_total"), decimals=0),
        number(
            "Checkpoint age",
            "What a failure now would cost",
            age("raypack_checkpoint_timestamp_seconds"),
            "s",
            0,
            limit=CHECKPOINT_AGE_SECONDS,
        ),
        number(
            "Since the last step",
            "Grows while nothing moves",
            age("raypack_step_timestamp_seconds"),
            "s",
            0,
            limit=NO_STEP_SECONDS,
        ),
        number("Memory", "Peak of the fullest rank", value("raypack_memory_bytes"), "bytes"),
    ),
)

TIME = Row(
    "Where the time goes",
    (
        series(
            "Goodput",
            "Share of the wall time that went into steps that count: since the run's start, and of the last hour",
            (value("raypack_goodput_ratio"), "{{run}} since the start"),
            (LATELY, "{{run}} last hour"),
            unit="percentunit",
            limit=GOODPUT,
            low=True,
        ),
        series(
            "Share of the wall time",
            "Steps, replayed ones too; standing still for checkpoints; held-out losses; the rest: starts, restarts, "
            "waits. Of several runs the mean",
            (f"avg({STEPS})", "steps"),
            (f"avg({SAVING})", "checkpoints"),
            (f"avg({EVALUATING})", "held-out losses"),
            (f"avg(clamp_min(1 - ({STEPS} + {SAVING} + {EVALUATING}), 0))", "the rest"),
            unit="percentunit",
            stacked=True,
        ),
        series("Time left", "At the pace of the last steps", (value("raypack_eta_seconds"), "{{run}}"), unit="s"),
        series(
            "Seconds a checkpoint",
            "That the slowest rank stood still for it; the writing goes on beside the steps",
            (
                f"{value('raypack_checkpoint_seconds_total')} / {value('raypack_checkpoints_total')}",
                "{{run}} mean of the run",
            ),
            unit="s",
        ),
        series(
            "Checkpoints",
            "Counted over the run",
            (value("raypack_checkpoints_total"), "{{run}} begun"),
            (value("raypack_checkpoint_failures_total"), "{{run}} failed"),
        ),
        Panel(
            "What runs",
            "Versions that the observer sees; ranks agree on the code before the first step",
            (
                Query(
                    value("raypack_build_info"),
                    "{{run}}: raypack {{version}} {{code}}, torch {{torch}}, Ray {{ray}}, Python {{python}}",
                ),
            ),
            "none",
            "stat",
            names=True,
        ),
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
            limit=CHECKPOINT_AGE_SECONDS,
        ),
        series(
            "Since the last step",
            "A saw-tooth as high as a step is long",
            (age("raypack_step_timestamp_seconds"), "{{run}}"),
            unit="s",
            limit=NO_STEP_SECONDS,
        ),
        series("Step", "Falls back where an attempt replays steps", (value("raypack_step"), "{{run}}")),
    ),
)

MACHINES = Row(
    "Machines",
    (
        series(
            "Busy: the ranks that are so longest",
            "Own computation, last step: a node whose ranks are always here is a slow machine",
            *by_rank("raypack_rank_busy_seconds"),
            unit="s",
        ),
        series(
            "Waiting: the ranks that wait longest",
            "For other ranks, last step",
            *by_rank("raypack_rank_wait_seconds"),
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
    "Ranks, nodes, goodput, restarts, checkpoints, slow machines.",
    (NOW, TIME, WORLD, MACHINES),
    ranks=True,
)
