"""Gathered keys and values: the full layers of LASP-2H (Sun et al. 2025, arXiv 2502.07563; docs/linear.md).

Queries stay in their shards, and all ranks of a block of c gather K and V: 2 K vectors a token to each other rank,
where exchanging heads moves about (2 H + 2 K) / c. Less where KV heads are few, roughly for 2 K c < 2 H + 2 K. The work
is uneven, since late queries see most keys: the last rank computes (2 c - 1) / c^2 of a document's pairs.
"""
