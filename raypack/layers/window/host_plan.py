"""S layers of a round on one rank: exchanged by heads inside the children."""

from __future__ import annotations

from raypack.exchange.heads.plan import ByHeads
from raypack.exchange.layout import Layout
from raypack.layers.frame import Around


def plan_window(around: Around) -> ByHeads:
    """A pure function of the layout; where F layers exchange the same, their exchange."""
    return around.by_heads(full=_alike(around.layout))


def _alike(layout: Layout) -> bool:
    """Whether S layers need nothing else than F layers: whole heads of every sample, exchanged over the same ranks.

    A plan without repacking then pays for one set of exchanges. Only attention by heads is known to be fit for that:
    gathered keys leave F's exchange out, and hsap brings a rank its node's tokens in place of the sample's.
    """
    return all(cohort.parent == cohort.child and cohort.attention == "ulysses" for cohort in layout.cohorts)
