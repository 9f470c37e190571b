"""KubeRay manifests: valid by the operator's own schema, and the same cluster as `cluster.yaml`."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from raypack.config.runfile import load_run

ROOT = Path(__file__).resolve().parents[1]
SCHEMAS = Path(__file__).resolve().parents[2] / "shared" / "kuberay"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MANIFESTS = {"RayCluster": ("raycluster.yaml", "rayclusters.yaml"), "RayJob": ("rayjob.yaml", "rayjobs.yaml")}


def _manifest(kind: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "kuberay" / MANIFESTS[kind][0]).read_text(encoding="utf-8"))


def _closed(schema: Any) -> Any:
    """The same schema, in which a key that it does not know is an error, as `kubectl apply` has it."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: _closed(value) for key, value in schema.items()}
    if out.pop("x-kubernetes-int-or-string", False):
        out.pop("anyOf", None)
        out["type"] = ["integer", "string"]
    if isinstance(out.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        out.setdefault("additionalProperties", False)
    return out


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    found = {}
    for kind, (_, name) in MANIFESTS.items():
        file = SCHEMAS / name
        if not file.is_file():
            pytest.skip(f"KubeRay's resource definitions are not there ({name} of its helm chart)")
        definition = yaml.load(file.read_text(encoding="utf-8"), Loader=LOADER)
        assert definition["spec"]["names"]["kind"] == kind
        [version] = [each for each in definition["spec"]["versions"] if each["name"] == "v1"]
        found[kind] = _closed(version["schema"]["openAPIV3Schema"])
        found[kind]["properties"]["metadata"] = {"type": "object"}
    return found


def _faults(schema: Any, manifest: dict[str, Any]) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest)]


@pytest.mark.parametrize("kind", MANIFESTS)
def test_the_operator_accepts_it(kind: str, schemas: dict[str, Any]) -> None:
    manifest = _manifest(kind)
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", kind)
    assert _faults(schemas[kind], manifest) == []


@pytest.mark.parametrize(
    "break_it",
    [
        lambda spec: spec["workerGroupSpecs"][0].update(maxReplica=8),
        lambda spec: spec["workerGroupSpecs"][0].update(minReplicas="none"),
        lambda spec: spec["headGroupSpec"].pop("template"),
        lambda spec: spec["authOptions"].update(mode="tokens"),
        lambda spec: spec["workerGroupSpecs"][0]["template"]["spec"]["containers"][0].update(volumeMount=[]),
    ],
    ids=["misspelt", "type", "missing", "choice", "deep"],
)
def test_the_check_notices_mistakes(break_it: Any, schemas: dict[str, Any]) -> None:
    manifest = copy.deepcopy(_manifest("RayCluster"))
    break_it(manifest["spec"])
    assert _faults(schemas["RayCluster"], manifest)


def test_the_job_brings_the_same_cluster() -> None:
    assert _manifest("RayJob")["spec"]["rayClusterSpec"] == _manifest("RayCluster")["spec"]


def _groups() -> Iterator[dict[str, Any]]:
    spec = _manifest("RayCluster")["spec"]
    yield spec["headGroupSpec"]
    yield from spec["workerGroupSpecs"]


def _env(group: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in group["template"]["spec"]["containers"][0]["env"]}


def test_pods_have_the_settings_of_cluster_yaml_and_all_the_same() -> None:
    started = " ".join(yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))["head_start_ray_commands"])
    settings = dict(re.findall(r"\b(RAYPACK_HOME|RAY_health_check_\w+)=(\S+?)[;\s]", started))
    assert len(settings) == 5
    for group in _groups():
        assert _env(group) == settings
        assert group["rayStartParams"]["metrics-export-port"] == "8080"


def test_the_head_offers_nothing_and_gpu_pods_come_and_go() -> None:
    head, gpu = _groups()
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "nvidia.com/gpu" not in head["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert gpu["minReplicas"] < gpu["maxReplicas"]
    spec = _manifest("RayCluster")["spec"]
    assert spec["enableInTreeAutoscaling"]
    assert spec["autoscalerOptions"]["version"] == "v2"
    assert spec["authOptions"] == {"mode": "token"}


def test_an_evicted_pod_has_time_to_drain() -> None:
    _, gpu = _groups()
    pod = gpu["template"]["spec"]
    script = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert "DRAIN_NODE_REASON_PREEMPTION" in script
    deadline = int(re.search(r"--deadline-remaining-seconds (\d+)", script)[1])
    waits = int(re.search(r"timeout (\d+)", script)[1])
    assert deadline <= waits < pod["terminationGracePeriodSeconds"] <= 120


HOOK = """
mkdir -p "$1"; printf '#!/bin/sh\\necho "$@" > %s/asked\\n' "$1" > "$1/ray"; chmod +x "$1/ray"; PATH="$1:$PATH"
/bin/bash -c "$2" || exit 10
test ! -e "$1/asked" || exit 11
bash -c 'exec -a ray::RayTrainWorker.poll sleep 2' &
/bin/bash -c "$2" || exit 12
kill -0 $! 2>/dev/null && exit 13
cat "$1/asked"
"""


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("pgrep")),
    reason="needs root, unshare and pgrep",
)
def test_the_hook_of_an_evicted_pod_drains_and_waits_for_its_workers_only(tmp_path: Path) -> None:
    _, gpu = _groups()
    script = gpu["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    pod = tmp_path / "pod.sh"  # a file: the text on a command line would itself match the worker's name
    pod.write_text(HOOK, encoding="utf-8")
    # In a process namespace of its own, as in a pod: other tests' workers do not count.
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", str(pod), str(tmp_path / "bin"), script],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert "drain-node --reason DRAIN_NODE_REASON_PREEMPTION" in done.stdout


def test_image_ray_and_torch_are_the_locked_ones() -> None:
    lock = (ROOT / "requirements-cpu.lock").read_text(encoding="utf-8")
    version = {name: re.search(rf"^{name}==(\S+)$", lock, re.MULTILINE)[1] for name in ("ray", "torch")}
    assert _manifest("RayCluster")["spec"]["rayVersion"] == version["ray"]
    dockerfile = (ROOT / "kuberay" / "Dockerfile").read_text(encoding="utf-8")
    assert f"FROM rayproject/ray:{version['ray']}-py311-gpu" in dockerfile
    assert f"torch=={version['torch']}" in dockerfile
    for group in _groups():
        assert f"raypack:{version['ray']}-" in group["template"]["spec"]["containers"][0]["image"]


def test_the_job_resumes_a_named_run_after_the_loss_of_its_cluster() -> None:
    spec = _manifest("RayJob")["spec"]
    assert spec["backoffLimit"] > 0
    words = spec["entrypoint"].split()
    assert words[:2] == ["python", "jobs/train_1f3s.py"]
    assert words[words.index("--run.resume") + 1] == "auto"
    assert "--run.name" in words
    assert load_run(words[2:]).topology.gpus_per_worker > 0


def test_claim_and_monitor_fit_the_pods() -> None:
    claim, monitor = (
        yaml.safe_load((ROOT / "kuberay" / name).read_text(encoding="utf-8"))
        for name in ("storage.yaml", "podmonitor.yaml")
    )
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    ports: set[str] = set()
    for group in _groups():
        pod = group["template"]["spec"]
        claims = [volume["persistentVolumeClaim"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
        assert claims == [{"claimName": claim["metadata"]["name"]}]
        ports |= {port["name"] for port in pod["containers"][0]["ports"]}
    assert {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} <= ports
    assert all(len(name) <= 15 for name in ports), "Kubernetes allows port names of 15 characters"
