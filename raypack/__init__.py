"""raypack: Ray-orchestrated, elastic training of hybrid-attention models on variable-length data.

What programs use. Every name is imported when it is first asked for, so that `import raypack` takes no time.

Plan a step for a described cluster, and cost the plan. No GPU and no Ray is needed:

>>> import raypack
>>> cluster, model = raypack.load_cluster("h100-8x8"), raypack.load_model("1f3s-30b-a3b")
>>> samples = raypack.Samples.of_lengths([60_000, 8_000, 8_000, 1_000])
>>> topology = raypack.Topology.regular(ranks=16, ranks_per_node=8)
>>> plan = raypack.make_plan(samples, topology, cluster, model, policy="joint")
>>> max(placement.parent.width for placement in plan.placements)
16
>>> figures = raypack.evaluate(plan, cluster, model)
>>> figures.seconds >= figures.bound_seconds > 0
True

A plan is plain data:

>>> raypack.plan_from_json(plan.to_json()) == plan
True

What one rank does in a round of it: its rows, its attention calls, what it sends and gets.

>>> frame = raypack.build_frame(plan.rounds[0], topology, rank=0, model=model)
>>> sum(raypack.build_frame(plan.rounds[0], topology, rank, model).rows for rank in range(16))
77000

Softmax attention over packed documents, and the model, here on one rank that meets nobody:

>>> import torch
>>> q, kv = torch.randn(9, 4, 8), torch.randn(9, 2, 8)
>>> raypack.attention(q, kv, kv, [5, 4], window=3).shape
torch.Size([9, 4, 8])
>>> small = raypack.load_model(
...     "1f3s-30b-a3b",
...     {
...         "layers": 4,
...         "width": 16,
...         "heads": 4,
...         "kv_heads": 2,
...         "head_dim": 8,
...         "experts": 4,
...         "experts_active": 2,
...         "expert_width": 8,
...         "vocabulary": 50,
...     },
... )
>>> alone = raypack.make_plan(raypack.Samples.of_lengths([5, 4]), raypack.Topology((1,)), cluster, small, "static")
>>> frame = raypack.build_frame(alone.rounds[0], alone.topology, rank=0, model=small)
>>> tokens = torch.arange(9)
>>> loss_sum = raypack.HybridModel(small)(tokens, labels=tokens, frame=frame, wire=raypack.Wire.alone())
>>> loss_sum.shape, loss_sum.requires_grad
(torch.Size([]), True)

A whole run, with this process as its driver; the same as `raypack train 1f3s_local --run.steps 10`:

>>> raypack.train(["1f3s_local", "--run.steps", "10"])  # doctest: +SKIP
PosixPath('.../runs/1f3s_local-20260301-101500-4711')
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypack.version import __version__ as __version__

if TYPE_CHECKING:
    from raypack.comm.wire import Wire as Wire
    from raypack.config import Config as Config
    from raypack.config import load_cluster as load_cluster
    from raypack.config import load_model as load_model
    from raypack.driver.job import train as train
    from raypack.errors import RaypackError as RaypackError
    from raypack.kernels.attention import attention as attention
    from raypack.layers.frame import build_frame as build_frame
    from raypack.model.decoder import HybridModel as HybridModel
    from raypack.plan.plan_file import plan_from_json as plan_from_json
    from raypack.plan.samples import Samples as Samples
    from raypack.plan.topology import Topology as Topology
    from raypack.planning.evaluate import evaluate as evaluate
    from raypack.planning.policies import make_plan as make_plan

_WHERE = {
    "Config": "raypack.config",
    "HybridModel": "raypack.model.decoder",
    "RaypackError": "raypack.errors",
    "Samples": "raypack.plan.samples",
    "Topology": "raypack.plan.topology",
    "Wire": "raypack.comm.wire",
    "attention": "raypack.kernels.attention",
    "build_frame": "raypack.layers.frame",
    "evaluate": "raypack.planning.evaluate",
    "load_cluster": "raypack.config",
    "load_model": "raypack.config",
    "make_plan": "raypack.planning.policies",
    "plan_from_json": "raypack.plan.plan_file",
    "train": "raypack.driver.job",
}

__all__ = [*_WHERE, "__version__"]  # noqa: PLE0604


if not TYPE_CHECKING:  # a type checker would take any name for one that is there

    def __getattr__(name: str) -> object:
        if name not in _WHERE:
            raise AttributeError(f"module 'raypack' has no attribute {name!r}")
        from importlib import import_module

        found = globals()[name] = getattr(import_module(_WHERE[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
