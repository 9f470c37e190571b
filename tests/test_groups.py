"""Groups: one per legal block, made by all ranks in one order, NCCL for CUDA, an explicit timeout on each."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from raypack.comm.agreement import digest_of
from raypack.comm.wire import Groups, backend_for
from raypack.errors import RaypackError
from raypack.plan.topology import Topology


@pytest.fixture
def made(monkeypatch):
    calls = []
    monkeypatch.setattr(dist, "get_world_size", lambda *a: 8)
    monkeypatch.setattr(dist, "get_rank", lambda *a: 0)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: calls.append((ranks, options)) or object())
    return calls


def test_cuda_selects_nccl_for_every_block_group_and_gloo_for_those_of_the_host(made):
    groups = Groups(Topology((4, 4)), torch.device("cuda", 3), timeout=77)
    assert [options["backend"] for _, options in made] == ["nccl"] * 7 + ["gloo"] * 2
    assert all(options["timeout"] == timedelta(seconds=77) for _, options in made)
    assert made[-2][0] == made[-1][0] == list(range(8))
    assert groups.host is not groups.world
    assert groups.storage not in (None, groups.host)


def test_on_cpus_the_world_group_serves_as_host_group(made):
    groups = Groups(Topology((4, 4)), torch.device("cpu"), timeout=77)
    assert [ranks for ranks, _ in made] == [
        list(range(8)), [0, 1, 2, 3], [4, 5, 6, 7], [0, 1], [2, 3], [4, 5], [6, 7], list(range(8)),
    ]  # fmt: skip
    assert {options["backend"] for _, options in made} == {"gloo"}
    assert groups.host is groups.world
    assert groups.storage not in (None, groups.host)
    assert len(groups) == 7


def test_a_topology_of_another_size_is_refused(made):
    with pytest.raises(RaypackError, match=r"add up to 6 ranks, the process group has 8"):
        Groups(Topology((4, 2)), torch.device("cpu"), timeout=1)


def test_other_devices_are_refused():
    with pytest.raises(RaypackError, match="cuda"):
        backend_for(torch.device("mps"))


def test_digests_tell_lists_of_parts_apart():
    assert digest_of("ab", "c") != digest_of("a", "bc")
    assert digest_of("a", 1) == digest_of("a", "1")
    assert len(digest_of()) == 32
