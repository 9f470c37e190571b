"""A run under Ray: checks, start, planner actor, workers, elasticity, and in one file Ray's internals."""
