"""One rank's training: the feed, the step, parameters and optimizer, the loop of an attempt. Knows no Ray."""
