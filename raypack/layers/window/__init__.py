"""S, sliding-window attention at the sample's child, by heads."""
