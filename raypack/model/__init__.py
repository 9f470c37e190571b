"""raypack's own decoder: the block loop over the layers, MLP and experts, head and loss, and its one-rank oracle."""
