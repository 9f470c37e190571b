"""A run under Ray: checks, start, planner actor, workers, elasticity, and the one file that knows Ray's internals."""
