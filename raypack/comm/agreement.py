"""Before a step moves anything, all ranks compare what they are about to do (docs/exchange.md).

gloo does not notice when two ranks run different plans (the receiver keeps stale rows), and a rank that failed alone
would leave the others waiting: so each step starts with one small all-gather on a CPU group.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from raypack.errors import RaypackError

_DIGEST, _COUNT = 32, 8
_SIZE = _DIGEST + _COUNT + 1
_TROUBLE, _NOTICE = 1, 2
# torch 2.13 renamed it; the old name warns there
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def digest_of(*parts: Any) -> bytes:
    """SHA-256 over the parts' text, each with its length, so that no two lists of parts look alike."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.digest()


def agree(
    group: dist.ProcessGroup | None,
    digest: bytes,
    described: str,
    trouble: str | None = None,
    *,
    notice: bool = False,
    labels: tuple[int, int] = (0, 0),
) -> bool:
    """Raise the same error on every rank unless all ranks bring the same digest, the labels that they should, and none
    is in trouble.

    Args:
        group: CPU group of all ranks; None in a world of one rank.
        digest: 32 bytes, of everything that has to be equal.
        described: what a person should read when digests differ, e.g. "step 12, attempt 0, plan 3f2a..".
        trouble: this rank's error text, if it has one.
        notice: this rank knows something that all should act on together.
        labels: how many this rank holds, and how many all ranks should hold together.

    Returns:
        whether any rank brings a notice; the same on every rank.

    Raises:
        RaypackError: on all ranks, with the ranks in trouble and their texts, the ranks that differ, or both counts.
    """
    if group is None:
        if trouble:
            raise RaypackError(trouble)
        _check_labels(labels[0], labels[1], described)
        return notice
    count, mark = labels[0].to_bytes(_COUNT, sys.byteorder), _TROUBLE * (trouble is not None) + _NOTICE * notice
    mine = torch.tensor([*digest, *count, mark], dtype=torch.uint8)
    every = torch.empty(dist.get_world_size(group) * _SIZE, dtype=torch.uint8)
    _all_gather(every, mine, group=group)
    table = every.view(-1, _SIZE)
    digests, marks = table[:, :_DIGEST], table[:, -1]
    if not (marks & _TROUBLE).any() and (digests == digests[0]).all():
        counts = table[:, _DIGEST:-1].contiguous().view(torch.int64)
        _check_labels(int(counts.sum()), labels[1], described)
        return bool((marks & _NOTICE).any())
    texts: list[Any] = [None] * len(table)
    dist.all_gather_object(texts, (described, trouble), group=group)
    raise RaypackError(_verdict(texts, [bytes(row.tolist()) for row in digests]))


def _check_labels(held: int, expected: int, described: str) -> None:
    """What the loss is summed over must be what it is divided by. Equal on all ranks, so all raise alike."""
    if held != expected:
        raise RaypackError(
            f"{described}: the plan counts {expected} labels, but all ranks together hold {held}: the loss would be "
            "divided by a wrong number; the corpus' label counts do not fit its tokens, build it again"
        )


def _verdict(texts: Sequence[tuple[str, str | None]], digests: Sequence[bytes]) -> str:
    failed = {rank: trouble for rank, (_, trouble) in enumerate(texts) if trouble}
    if failed:
        ranks = ", ".join(map(str, failed))
        return f"rank {ranks} cannot go on: {next(iter(failed.values()))}"
    usual = max(set(digests), key=lambda d: (digests.count(d), -digests.index(d)))
    common = digests.index(usual)
    odd = [rank for rank, digest in enumerate(digests) if digest != usual]
    return (
        f"ranks disagree before the step: rank {', '.join(map(str, odd))} brings {texts[odd[0]][0]}, "
        f"the others {texts[common][0]}; all ranks need the same plan, config, corpus and code"
    )
