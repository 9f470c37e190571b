"""Models, clusters and runs by name: TOML files."""
