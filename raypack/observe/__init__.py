"""What a run leaves while it goes on: records, metrics, the observer that gathers them, the sinks they go to."""
