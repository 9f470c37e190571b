"""raypack: Ray-orchestrated, elastic training of hybrid-attention models on variable-length data."""

__version__ = "0.1.0"
