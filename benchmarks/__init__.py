"""Measurements that `python -m benchmarks` prints. Each module with a `main(quick: bool)` is one benchmark."""
