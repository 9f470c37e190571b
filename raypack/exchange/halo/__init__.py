"""Rows before a shard: what a rank needs of the tokens that lie to the left of its own.

A stream is cut into contiguous shards. A layer whose token t sees only t - w + 1 ... t needs at most w - 1 rows from
before each shard, of the document that enters it and of no other; where shards are short they lie several ranks back.
Each travels from its owner straight to its user, in one all-to-all; gradients go back the same way and are added in a
fixed order. The short convolutions of linear layers use it (docs/linear.md).
"""
