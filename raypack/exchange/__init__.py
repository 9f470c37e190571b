"""Who holds what, and how it moves: layouts, a room for each published method with its plan, cost and run."""
