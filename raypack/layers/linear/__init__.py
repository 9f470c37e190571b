"""L, linear attention at the sample's child: states cross ranks, tokens stay (docs/linear.md)."""
