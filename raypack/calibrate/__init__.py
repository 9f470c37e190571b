"""Measures the ranks at hand and writes the cluster file that the cost model reads (docs/simulate.md)."""
