"""Names from outside, `package.module:object`: found, refused in one line, and used by planner, layers and corpora."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.policy import soonest
from raypack.cli import main
from raypack.config import ModelConfig, TrainSection, load_cluster, load_model
from raypack.data.build import build_corpus
from raypack.data.corpus import Corpus
from raypack.errors import RaypackError
from raypack.kernels.attention import attention, find_kernel
from raypack.kernels.packing import Packing
from raypack.layers import oracle
from raypack.layers.costs import Costs
from raypack.layers.kinds import kinds_of
from raypack.plan.plan import check_plan
from raypack.plan.samples import Samples
from raypack.plan.table import Table
from raypack.plan.topology import Topology
from raypack.planning.evaluate import evaluate
from raypack.planning.policies import make_plan
from raypack.planning.problem import Problem
from raypack.registry import resolve
from raypack.training.parameters import build_parameters
from tests import threads
from tests.ranks import Case, tiny_model
from tests.test_invariant import check
from tests.test_small_worlds import ROOMY, STREAMS

HERE = __name__
ROOT = Path(__file__).resolve().parent.parent
KNOWN = {"one": 1.0, "late": "math:pi"}


# -- what the tests below name


class Words:
    """Each length of a word is an id."""

    name, vocabulary, end_of_document = "words", 20, 19

    def encode(self, chunks):
        yield np.array([len(word) for word in "".join(chunks).split()])


class TooMany(Words):
    vocabulary = 4


def over_the_cap(problem: Problem) -> Table:
    zeros, ones = np.zeros(len(problem.lengths), dtype=np.int64), np.ones(len(problem.lengths), dtype=np.int64)
    return problem.table(zeros, zeros, ones, zeros, ones)


def in_no_block(problem: Problem) -> Table:
    ones = np.ones(len(problem.lengths), dtype=np.int64)
    return problem.table(0 * ones, ones, 2 * ones, ones, 2 * ones)


def other_samples(problem: Problem) -> Table:
    other = Problem(Samples.of_lengths([5]), *(getattr(problem, name) for name in list(vars(problem))[1:7]))
    return soonest(other)


def stumbles(problem: Problem) -> Table:
    raise IndexError("of its own")


def returns_nothing(problem: Problem) -> None: ...


# -- the door


def test_a_shipped_name_is_itself_or_is_loaded_when_asked_for() -> None:
    assert resolve("one", KNOWN, "it") == 1.0
    assert resolve("late", KNOWN, "it") == pytest.approx(3.14159, abs=1e-5)


def test_a_name_from_outside_may_lie_deep() -> None:
    assert resolve("json.decoder:JSONDecoder.decode", {}, "it") is json.JSONDecoder.decode


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("on", "it = 'on': did you mean 'one'? must be 'one', 'late' or package.module:object"),
        ("json.dumps", "must be 'one', 'late' or package.module:object"),
        ("json:", "must be 'one'"),
        ("../json:dumps", "must be 'one'"),
        ("json:dump s", "must be 'one'"),
        ("no_such.package:x", "there is no module no_such here"),
        ("json.no_such:x", "there is no module json.no_such here"),
        ("json:dumbs", "json has no dumbs: did you mean dumps?"),
        ("json:decoder.nothing_like_it", "json has no decoder.nothing_like_it"),
        ("json:__doc__", "must be a callable, and is of type str"),
        ("broken_module:x", "failed: ZeroDivisionError: division by zero (broken_module.py, line 2)"),
        ("lacking_module:x", "failed: ModuleNotFoundError: No module named 'a_package_nobody_has'"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_line(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("\n1 / 0\n")
    (tmp_path / "lacking_module.py").write_text("import a_package_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RaypackError) as refused:
        resolve(name, KNOWN, "it")
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_module_in_the_current_directory_is_found_and_shadows_nothing_installed(tmp_path: Path) -> None:
    (tmp_path / "own_module.py").write_text("def here(): ...\n")
    (tmp_path / "tomli_w.py").write_text("1 / 0\n")
    code = (
        "from raypack.registry import resolve\n"
        "print(resolve('own_module:here', {}, 'it').__name__, resolve('tomli_w:dumps', {}, 'it').__name__)"
    )
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{code}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "here dumps\n", done.stderr


# -- policies

POLICY = "examples.policy:soonest"
LENGTHS = [40_000, 9_000, 8_000, 700, 650, 600, 31, 30, 1]


@pytest.mark.parametrize("attention_", ["ulysses", "kv_gather", "auto", "hsap"])
def test_a_foreign_policy_plans_under_every_attention(attention_: str) -> None:
    cluster, model = load_cluster("h100-8x8"), load_model("1f3s-30b-a3b")
    topology = Topology.regular(16, 8)
    made = make_plan(Samples.of_lengths(LENGTHS), topology, cluster, model, POLICY, attention=attention_)
    check_plan(made)
    assert made.policy == POLICY
    assert sorted(p.length for p in made.placements) == sorted(LENGTHS)
    figures = evaluate(made, cluster, model)
    assert figures.bound_seconds <= figures.seconds < 3 * figures.bound_seconds
    again = make_plan(Samples.of_lengths(LENGTHS), topology, cluster, model, POLICY, attention=attention_)
    assert again == made


def test_the_example_opens_a_round_where_one_is_full() -> None:
    cluster, model = load_cluster("h100-8x8", {"rank_tokens_max": 5_000}), load_model("1f3s-30b-a3b")
    made = make_plan(Samples.of_lengths([30_000, 30_000, 9_000]), Topology((8,)), cluster, model, POLICY)
    assert len(made.rounds) > 1


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("over_the_cap", "over the cap of 32768"),
        ("in_no_block", "is no block of nodes"),
        ("other_samples", "has other samples than it was given"),
        ("stumbles", "failed: IndexError: of its own (test_registry.py, line"),
        ("returns_nothing", "must return a raypack.plan.table.Table, and returned None"),
    ],
)
def test_what_a_foreign_policy_does_wrong_is_one_line(policy: str, text: str) -> None:
    cluster, model = load_cluster("h100-8x8"), load_model("1f3s-30b-a3b")
    with pytest.raises(RaypackError) as refused:
        make_plan(Samples.of_lengths(LENGTHS), Topology((8,)), cluster, model, f"{HERE}:{policy}")
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_commands_take_a_foreign_policy(tmp_path: Path) -> None:
    file = tmp_path / "step.txt"
    file.write_text("\n".join(map(str, LENGTHS)))
    common = ["--lengths", str(file), "--ranks", "8", "--json", "-"]
    done = CliRunner().invoke(main, ["plan", *common, "--policy", POLICY])
    assert json.loads(done.stdout)["policy"] == POLICY
    done = CliRunner().invoke(main, ["simulate", *common, "--steps", "2", "--policies", f"dynamic,{POLICY}"])
    assert list(json.loads(done.stdout)["policies"]) == ["dynamic", POLICY]
    done = CliRunner().invoke(main, ["plan", *common, "--policy", "jiont"])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: policy = 'jiont': did you mean 'joint'?")


# -- layer kinds

GATED = {"pattern": "GF", "own_layers": "G=gated_linear.kind:GATED"}


@pytest.fixture
def with_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the folder `examples`, where a user of them stands."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


@pytest.mark.parametrize("shard", ["none", "world"])
def test_a_foreign_layer_kind_trains_as_its_oracle_does(with_examples: None, shard: str) -> None:
    """Loss and gradients of one rank, and bytes as planned, in nested children over nodes of unequal size."""
    model = tiny_model(**GATED, experts=0, linear_conv=4, linear_chunk=4, linear_feature="silu")
    train = TrainSection(dtype="float64", chunk_tokens=7, shard=shard)
    ledgers = check(threads, Case(model, train), STREAMS)
    sent = sum((Counter(ledger["collected"]) for ledger in ledgers), Counter())
    for scope, size in evaluate(STREAMS, ROOMY, model, itemsize=8).bytes["state_gather"].items():
        assert sent["state_gather", scope] == size > 0


@pytest.mark.parametrize("sync", ["step", "layer", "node"])
def test_a_foreign_layer_kind_is_planned_at_its_own_price(with_examples: None, sync: str) -> None:
    cluster, linear = load_cluster("h100-8x8"), {"pattern": "LF", "linear_decay": "none"}
    costs = [Costs(load_model("1f3s-30b-a3b", changes), cluster) for changes in (GATED, linear)]
    own, plain = (each.layers[1] for each in costs)
    assert own.token_seconds("none") > plain.token_seconds("none") > 0
    topology = Topology.regular(16, 8)
    made = make_plan(Samples.of_lengths(LENGTHS), topology, cluster, costs[0].model, "joint", budget=200)
    figures = evaluate(made, cluster, costs[0].model, sync)
    assert figures.bound_seconds <= figures.seconds < 3 * figures.bound_seconds
    assert figures.model_flops > evaluate(made, cluster, costs[1].model, sync).model_flops


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"pattern": "FD"}, "pattern = 'FD'"),
        ({"pattern": "GF", "own_layers": "G=gated_linear"}, "own_layers: 'G=gated_linear'"),
        ({"pattern": "GF", "own_layers": "F=gated_linear.kind:GATED"}, "own_layers: 'F=gated_linear.kind:GATED'"),
    ],
)
def test_a_pattern_of_kinds_that_nobody_knows_is_refused(changes: dict[str, str], text: str) -> None:
    with pytest.raises(RaypackError, match=re.escape(text)):
        load_model("1f3s-30b-a3b", changes)


@pytest.mark.parametrize(
    ("name", "text"),
    [("no_such:GATED", "no_such"), ("gated_linear.kind:FLOOR", "LayerKind"), ("gated_linear.kind:GATED", "'D'")],
)
def test_what_is_no_layer_kind_is_refused_before_anything_is_planned(with_examples: None, name: str, text: str) -> None:
    letter = "D" if name.endswith("GATED") and "kind" in name else "G"
    model = load_model("1f3s-30b-a3b", {"pattern": f"{letter}F", "own_layers": f"{letter}={name}"})
    with pytest.raises(RaypackError, match=re.escape(text)):
        kinds_of(model)


# -- kernels

KERNEL = "examples.kernel:by_document"


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 6),
    sinks=st.integers(0, 2),
    kernel=st.sampled_from(["exact", KERNEL]),
    seed=st.integers(0, 99),
)
def test_named_kernels_agree_with_the_oracle(
    lengths: list[int], window: int | None, sinks: int, kernel: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(sum(lengths), h, 4, generator=generator, dtype=torch.float64) for h in (4, 2, 2))
    given_ = [x.requires_grad_() for x in (q, k, v)]
    got = attention(*given_, lengths, window=window, sinks=sinks, kernel=find_kernel(kernel))
    expected = oracle.attention(*given_, lengths, window=window, sinks=sinks)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    ours, theirs = (torch.autograd.grad(out.square().sum(), given_) for out in (got, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_the_example_kernel_takes_more_keys_than_queries() -> None:
    q, k, v = (torch.randn(n, 2, 4, dtype=torch.float64) for n in (3, 7, 7))
    own, exact = (
        attention(q, k, v, [1, 2], keys=Packing([3, 4]), kernel=find_kernel(name)) for name in (KERNEL, "exact")
    )
    torch.testing.assert_close(own, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", ["flash_attn", "torch_varlen"])
def test_a_kernel_that_cannot_refuses(kernel: str) -> None:
    q = torch.randn(6, 2, 4)
    with pytest.raises(RaypackError, match=f"kernel {kernel} has no sinks"):
        attention(q, q, q, [6], window=2, sinks=1, kernel=find_kernel(kernel))


def test_every_softmax_layer_of_a_run_gets_the_kernel_of_its_settings() -> None:
    model = ModelConfig(pattern="FSL", layers=3, width=16, heads=2, kv_heads=2, head_dim=8, ffn_width=8, experts=0)
    made = build_parameters(model, TrainSection(kernel=KERNEL), 0, None, torch.device("cpu"))
    kernels = [getattr(layer.attention, "kernel", "none") for layer in made.model.layers]
    assert kernels == [find_kernel(KERNEL), find_kernel(KERNEL), "none"]
    with pytest.raises(RaypackError, match=r"train.kernel = 'json:dumbs'"):
        build_parameters(model, TrainSection(kernel="json:dumbs"), 0, None, torch.device("cpu"))


# -- tokenizers


def test_a_corpus_is_built_by_a_foreign_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one three five")
    out = tmp_path / "corpus"
    done = CliRunner().invoke(
        main, ["data", "build", "--input", str(tmp_path / "a.txt"), "--out", str(out), "--tokenizer", f"{HERE}:Words"]
    )
    assert done.exit_code == 0, done.output
    corpus = Corpus.open(out)
    assert (corpus.header.tokenizer, corpus.vocabulary) == ("words", 20)
    assert corpus.tokens(0, 0, 4).tolist() == [3, 5, 4, 19]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bytes", "tokenizer = 'bytes': did you mean 'byte'?"),
        (f"{HERE}:over_the_cap", "must be a class with name, vocabulary"),
        (f"{HERE}:TooMany", "made ids 3..5, and says that its vocabulary is 4"),
    ],
)
def test_a_tokenizer_that_does_not_do_leaves_nothing_behind(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "a.txt").write_text("one three five")
    with pytest.raises(RaypackError) as refused:
        build_corpus([tmp_path / "a.txt"], tmp_path / "corpus", tokenizer=name, progress=False)
    assert text in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
