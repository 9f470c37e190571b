"""Where good ends, once: alerts fire there, panels draw their lines there."""

from __future__ import annotations

NO_STEP_SECONDS = 900
CHECKPOINT_AGE_SECONDS = 7200
PLAN_LATE = 0.05
"""Share of step time."""
RANK_SLOW = 1.5
"""Busy seconds over the mean of the ranks."""
INTER_RISE = 0.1
"""Share of exchange bytes, against an hour before."""
GOODPUT = 0.5
"""Share of the last hour."""
DRIFT = 1.3
"""Measured over modelled seconds, against an hour before."""
ROUTER_COLLAPSED = 0.8
"""0 = experts are chosen evenly, 1 = every token takes the same ones."""
RESTARTS = 3
"""In an hour."""
