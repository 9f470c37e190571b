"""From measured points to a cluster file (pure): a line through each series, and what the lines say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tomli_w

from raypack.calibrate.fit import LineFit, Series, fit_line
from raypack.config import ClusterConfig, ModelConfig, build
from raypack.errors import RaypackError

PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}
"""bf16 FLOP/s without sparsity, from the data sheets, by torch's device name. Other devices: the best rate measured."""

ROUGH_R_SQUARED, ROUGH_WORST = 0.9, 0.3


@dataclass(frozen=True)
class Wanted:
    """What every rank is asked for.

    Attributes:
        repeats: timed calls of each point.
        timeout: seconds of each collective, and of everything together where this process started the ranks.
        model: measures `round_seconds` too; None = not.
        shard: where that model's parameters live, `none` or `world`.
    """

    repeats: int = 10
    timeout: float = 300.0
    model: ModelConfig | None = None
    shard: str = "none"


@dataclass(frozen=True)
class Measurements:
    """Plain data, the same on every rank.

    Attributes:
        nodes: ranks of each node.
        device, backend: name of the device and of the communication library.
        kernel: attention backend.
        launch_seconds: of one attention call with next to no tokens.
        matmul, attention: FLOPs of one rank; attention with its backward.
        intra, inter: bytes that one rank sends to ranks of its own node / of other nodes; None where there are none.
        rounds: rounds of a training step of `model`; None where no model was given.
    """

    nodes: tuple[int, ...]
    device: str
    backend: str
    kernel: str
    launch_seconds: float
    matmul: Series
    attention: Series
    intra: Series | None = None
    inter: Series | None = None
    rounds: Series | None = None
    model: str = ""


@dataclass(frozen=True)
class Calibration:
    """The cluster that the measurements describe, the line behind each figure, and what was not measured."""

    cluster: ClusterConfig
    fits: dict[str, LineFit]
    peak_source: str
    unmeasured: tuple[str, ...]


def calibrate(found: Measurements, *, peak_flops: float | None = None, name: str = "calibrated") -> Calibration:
    """Fit every series and put the figures together.

    Args:
        peak_flops: of one rank; None = the data sheet's where the device is known, else the best rate measured.

    Raises:
        RaypackError: nodes of unequal size, a series that is no line (`fit_line`), or a peak below the rate measured.
    """
    check_equal(found.nodes)
    series: dict[str, Series | None] = {
        "matmul": found.matmul,
        "attention": found.attention,
        "intra": found.intra,
        "inter": found.inter,
    }
    series["rounds"] = found.rounds
    fits = {what: fit_line(points, what) for what, points in series.items() if points is not None}
    rates = fits["matmul"].rate, fits["attention"].rate
    peak, peak_source = _peak(found, max(rates), peak_flops)
    intra, inter = fits.get("intra") or fits.get("inter"), fits.get("inter") or fits.get("intra")
    figures: dict[str, Any] = {
        "nodes": len(found.nodes),
        "ranks_per_node": found.nodes[0],
        "peak_flops": peak,
        "matmul_share": rates[0] / peak,
        "attention_share": rates[1] / peak,
        "launch_seconds": found.launch_seconds,
    }
    for scope, fit in (("intra", intra), ("inter", inter)):
        if fit is not None:
            figures.update({f"{scope}_rate": fit.rate, f"{scope}_latency": fit.fixed})
    if "rounds" in fits:
        figures["round_seconds"] = 1 / fits["rounds"].rate
    figures = {key: value if isinstance(value, int) else float(f"{value:.6g}") for key, value in figures.items()}
    source = (
        f"measured by raypack calibrate: {sum(found.nodes)} ranks on {len(found.nodes)} nodes, {found.device}, "
        f"{found.backend}, attention {found.kernel}; peak_flops: {peak_source}"
    )
    source += f"; round_seconds: {found.model}" if found.model else ""
    cluster = build(ClusterConfig, {"name": name, "source": source, **figures}, "cluster")
    return Calibration(cluster, fits, peak_source, _unmeasured(found))


def check_equal(nodes: Sequence[int]) -> None:
    """Raises RaypackError for nodes of unequal size."""
    if len(set(nodes)) > 1:
        raise RaypackError(
            f"nodes = {', '.join(map(str, nodes))}: a cluster file describes nodes of equal size; use equal ones"
        )


def _peak(found: Measurements, measured: float, given: float | None) -> tuple[float, str]:
    if given is not None:
        if given < measured:
            raise RaypackError(
                f"peak-flops = {given:.4g}: below the {measured:.4g} FLOP/s measured here; give the data sheet's figure"
            )
        return given, "as given"
    if found.device in PEAKS and PEAKS[found.device] >= measured:
        return PEAKS[found.device], f"data sheet of {found.device}"
    return measured, "the best rate measured (no data sheet known), so MFU is relative to it"


def rough(made: Calibration) -> list[str]:
    """One line for each figure whose points are far from their line."""
    return [
        f"{what}: rough, R^2 {fit.r_squared:.2f}, worst point {100 * fit.worst:.0f} % off; other work on the machine? "
        "measure again with more --repeats"
        for what, fit in made.fits.items()
        if fit.r_squared < ROUGH_R_SQUARED or fit.worst > ROUGH_WORST
    ]


def _unmeasured(found: Measurements) -> tuple[str, ...]:
    """Lines about figures of the file that no measurement stands behind."""
    lines = ["rank_tokens_max, sync, prefetch_layers: defaults, not measured; set them for your model"]
    if found.rounds is None:
        lines.append("round_seconds: the default, not measured; --model measures it")
    if found.inter is None and found.intra is not None:
        lines.append("one node: inter_rate and inter_latency repeat the figures inside a node")
    if found.intra is None and found.inter is not None:
        lines.append("one rank a node: intra_rate and intra_latency repeat those across nodes")
    if found.intra is None and found.inter is None:
        lines.append("one rank: rates and latencies are the defaults of raypack's settings")
    return tuple(lines)


def to_toml(made: Calibration) -> str:
    """The cluster file: fits as comments, then the settings that `--cluster FILE` reads."""
    comments = [
        f"{what}: fixed {fit.fixed:.3g} s, rate {fit.rate:.4g}/s, R^2 {fit.r_squared:.4f}, "
        f"worst point {100 * fit.worst:.1f} %, {fit.points} points"
        for what, fit in made.fits.items()
    ]
    head = "".join(f"# {line}\n" for line in (*comments, *made.unmeasured))
    return head + tomli_w.dumps(made.cluster.model_dump())


def to_data(made: Calibration) -> dict[str, Any]:
    """The JSON object of `raypack calibrate`."""
    return {
        "cluster": made.cluster.model_dump(),
        "fits": {what: asdict(fit) for what, fit in made.fits.items()},
        "peak_source": made.peak_source,
        "unmeasured": list(made.unmeasured),
    }
