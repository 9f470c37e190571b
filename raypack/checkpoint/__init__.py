"""Checkpoints: written beside training, complete or not there, read at any world size (docs/elastic.md)."""
