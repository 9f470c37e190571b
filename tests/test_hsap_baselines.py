"""The methods that hsap is compared with are right, too: outputs and gradients against the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from raypack.config import load_cluster, load_model
from raypack.plan.plan import Round
from tests.hsap_ranks import Case, method_on_rank, oracle
from tests.test_layout import place

benchmarks = pytest.importorskip("benchmarks.hsap_methods", reason="benchmarks are not beside the tests")

pytestmark = pytest.mark.pool
LENGTHS = [70, 31, 9, 1, 17]


@pytest.mark.parametrize("name", list(benchmarks.methods(load_cluster("local-2x4"), load_model("1f3s-30b-a3b"))))
def test_every_method_gives_the_outputs_and_gradients_of_one_rank(pool, name):
    case = Case(4, 2)
    expected = oracle(case, Round(tuple(place(i, n, (0, 1), (0, 1)) for i, n in enumerate(LENGTHS))))
    got = {}
    for found in pool.run(4, method_on_rank, case, LENGTHS, (2, 2), name):
        got.update(found)
    assert got.keys() == expected.keys()
    for where, (out, grad) in expected.items():
        assert np.abs(got[where][0] - out).max() <= 1e-10, where
        assert np.abs(got[where][1] - grad).max() <= 1e-10, where


def test_packs_have_exactly_the_tokens_asked_for():
    made = benchmarks.packs(np.array([3, 50, 700]), 1000, 4)
    assert [sum(pack) for pack in made] == [1000] * 4
    assert all(min(pack) >= 1 for pack in made)
