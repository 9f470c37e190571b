"""A room for each layer kind (full, window, linear): its record with costs, module, host plan and oracle."""
