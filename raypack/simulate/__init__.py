"""Length lists replayed through policies on a described cluster (docs/simulate.md)."""
