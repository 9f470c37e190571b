"""How the heads of a layer are split over the ranks of a block."""

from __future__ import annotations

from functools import cache


@cache
def head_share(heads: int, kv_heads: int, width: int) -> tuple[tuple[int, int, int, int], ...]:
    """Heads of each of `width` ranks: (first query head, end, first KV head, end).

    Query heads are split as evenly as possible, the first ranks get the extra ones; ranks beyond the heads get none.
    A rank has the KV heads that its query heads use, so KV heads are copied where ranks outnumber them.
    """
    per_kv = heads // kv_heads
    base, extra = divmod(heads, width)
    shares = []
    for i in range(width):
        lo = i * base + min(i, extra)
        hi = lo + base + (i < extra)
        shares.append((lo, hi, lo // per_kv, (hi - 1) // per_kv + 1) if hi > lo else (lo, lo, 0, 0))
    return tuple(shares)
