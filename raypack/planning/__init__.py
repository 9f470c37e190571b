"""Who decides: cost of a plan, bounds, policies, and the steps of a run one after the other (docs/planning.md)."""
