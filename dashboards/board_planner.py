"""The dashboard of planning: are plans in time, how near the bound, what do they look like."""

from __future__ import annotations

from dashboards.limits import PLAN_LATE, RANK_SLOW
from dashboards.panels import (
    INTER,
    PLANNED,
    Board,
    Row,
    a_step,
    a_step_modelled,
    against_own,
    by_rank,
    imbalance,
    number,
    sent,
    series,
    speed,
    value,
)

LATE = f"{speed('raypack_plan_late_seconds_total')} / {speed('raypack_step_seconds_sum')}"

NOW = Row(
    "Now",
    (
        number("Plan / bound", "1 = no plan can be faster", value("raypack_plan_bound_ratio"), decimals=3),
        number("Time to make", "The last step's plan", value("raypack_plan_seconds"), "s"),
        number("Waited for", "The last step's plan, longest rank", value("raypack_plan_wait_seconds"), "s"),
        number("Late", "Share of step time spent waiting for plans", LATE, "percentunit", limit=PLAN_LATE),
        number("Samples a step", "", a_step("raypack_samples_total"), decimals=1),
        number("Rounds a step", "", a_step("raypack_rounds_total"), decimals=2),
    ),
)

TIME = Row(
    "Time",
    (
        series(
            "Plan time",
            "The planner works ahead: its time matters where ranks wait",
            (value("raypack_plan_seconds"), "{{run}} to make"),
            (value("raypack_plan_wait_seconds"), "{{run}} waited for"),
            (value("raypack_prepare_seconds"), "{{run}} frames and tokens, beside the step before"),
            unit="s",
        ),
        series(
            "Late",
            "Share of step time spent waiting for plans",
            (LATE, "{{run}}"),
            unit="percentunit",
            limit=PLAN_LATE,
        ),
        series(
            "Plan / bound",
            "Planned seconds over the area bound; 1 = no plan can be faster",
            (value("raypack_plan_bound_ratio"), "{{run}}"),
        ),
    ),
)

SHAPE = Row(
    "Shape",
    (
        series(
            "Samples by parent width",
            "A second; ranks that share a sample's full attention",
            (speed("raypack_block_samples_total", 'block="parent"', by="width"), "{{width}}"),
            unit="short",
            stacked=True,
        ),
        series(
            "Samples by child width",
            "A second; ranks that hold a sample everywhere else",
            (speed("raypack_block_samples_total", 'block="child"', by="width"), "{{width}}"),
            unit="short",
            stacked=True,
        ),
        series(
            "Steps by policy",
            "A second; a later policy may return an earlier one's plan",
            (speed("raypack_plans_total", by="run, policy"), "{{run}} {{policy}}"),
            unit="short",
            stacked=True,
        ),
        series(
            "Tokens: the ranks that hold most",
            "In the child layout, last step",
            *by_rank("raypack_rank_tokens"),
            unit="short",
        ),
        series(
            "Token imbalance",
            "Largest rank over mean; 1 = even",
            (imbalance("raypack_rank_tokens"), "{{run}}"),
            limit=RANK_SLOW,
        ),
        series(
            "Tokens and labels a second",
            "Each once, whatever its block width; labels are what the loss is taken over",
            (speed("raypack_tokens_total"), "{{run}} tokens"),
            (speed("raypack_labels_total"), "{{run}} labels"),
            unit="short",
        ),
    ),
)

WORTH = Row(
    "What it is worth",
    (
        series(
            "Seconds a step, all by the cost model",
            "Of the run's plans, and of static and dynamic plans for the same samples",
            (a_step_modelled("own"), "{{run}} own"),
            (a_step_modelled("static"), "{{run}} static"),
            (a_step_modelled("dynamic"), "{{run}} dynamic"),
            unit="s",
            span=12,
        ),
        series(
            "The same, over the run's own",
            "2 = such plans would take twice as long, by the cost model",
            (against_own("static"), "{{run}} static"),
            (against_own("dynamic"), "{{run}} dynamic"),
            unit="suffix:x",
            span=12,
        ),
        series(
            "Bytes across nodes a step",
            "This run, and what static and dynamic plans would send",
            (f"{sent(INTER)} / {speed('raypack_step_seconds_count')}", "{{run}} sent"),
            (a_step(PLANNED, INTER, 'policy="static"'), "{{run}} as static"),
            (a_step(PLANNED, INTER, 'policy="dynamic"'), "{{run}} as dynamic"),
            unit="bytes",
        ),
        series(
            "Static plans, by site and scope",
            "Bytes a second that they would have sent",
            (speed(PLANNED, 'policy="static"', by="site, scope"), "{{site}} {{scope}}"),
            unit="Bps",
            stacked=True,
        ),
        series(
            "Dynamic plans, by site and scope",
            "Bytes a second that they would have sent",
            (speed(PLANNED, 'policy="dynamic"', by="site, scope"), "{{site}} {{scope}}"),
            unit="Bps",
            stacked=True,
        ),
    ),
)

BOARD = Board(
    "raypack-planner",
    "raypack planner",
    "Plans: in time, near the bound, block widths, seconds and bytes against static and dynamic plans.",
    (NOW, TIME, SHAPE, WORTH),
    ranks=True,
)
