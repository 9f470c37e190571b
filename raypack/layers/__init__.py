"""A room for each layer kind (full, window, linear): its record, module, host plan, cost and one-rank oracle."""
