"""What a cluster file offers: a Ray cluster launcher YAML, or a KubeRay RayCluster or RayJob manifest.

Both are brought into the form in which Ray's own autoscaler reads them, by Ray's own code, so that a node counts here
for exactly what it will count for there. That code is private to Ray and imported here only, when a file is read:
neither Ray Train nor torch comes with it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from raypack.clusters.check import ClusterShape, NodeType
from raypack.errors import RaypackError

KUBERAY_GROUP = "ray.io/"


def read_cluster_file(path: str | Path) -> ClusterShape:
    """Read and check a cluster file.

    Raises:
        RaypackError: it cannot be read, is neither kind, breaks Ray's own rules, or does not say what a node offers.
    """
    documents = _documents(path)
    manifests = [each for each in documents if str(each.get("apiVersion", "")).startswith(KUBERAY_GROUP)]
    if len(manifests) > 1:
        raise RaypackError(f"{path} has {len(manifests)} Ray manifests: give a file with one RayCluster or RayJob")
    if manifests:
        return _from_manifest(str(path), manifests[0])
    if len(documents) == 1 and "provider" in documents[0]:
        return _from_launcher(str(path), documents[0])
    raise RaypackError(
        f"{path} is no cluster file: expected a Ray cluster launcher file (with `provider`) or a KubeRay manifest "
        "(apiVersion ray.io/v1)"
    )


def _documents(path: str | Path) -> list[dict[str, Any]]:
    try:
        found = list(yaml.safe_load_all(Path(path).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RaypackError(f"cannot read {path}: {error}") from None
    documents = [each for each in found if each is not None]
    if not documents or not all(isinstance(each, dict) for each in documents):
        raise RaypackError(f"{path} is no cluster file: its YAML must be a mapping")
    return documents


def _from_launcher(source: str, config: dict[str, Any]) -> ClusterShape:
    if not isinstance(config["provider"], dict) or config["provider"].get("type") == "local":
        raise RaypackError(
            f"{source}: provider local does not say what a machine offers; start the cluster and give --address"
        )
    ready = _validated(source, config)
    return ClusterShape(source, _node_types(source, ready), nodes_max=int(ready["max_workers"]) + 1)


def _validated(source: str, config: dict[str, Any]) -> dict[str, Any]:
    """What `ray up` makes of the file before it asks a cloud for anything."""
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import prepare_config, validate_config

    logging.getLogger("ray.autoscaler").setLevel(logging.WARNING)
    try:
        ready: dict[str, Any] = prepare_config(copy.deepcopy(config))
        validate_config(ready)
    except ValidationError as error:
        where = ".".join(map(str, error.absolute_path))
        raise RaypackError(f"{source}{f', {where}' if where else ''}: {error.message}") from None
    except Exception as error:  # whatever Ray's code raises on a file that is not as it expects
        raise RaypackError(f"{source} is refused by Ray: {_named(error)}") from None
    return ready


def _from_manifest(source: str, manifest: dict[str, Any]) -> ClusterShape:
    spec = _cluster_spec(source, manifest)
    config = _as_autoscaler_config(source, manifest, spec)
    types = _node_types(source, config)
    return ClusterShape(source, types, nodes_max=sum(kind.most for kind in types))


def _cluster_spec(source: str, manifest: dict[str, Any]) -> dict[str, Any]:
    kind, spec = manifest.get("kind"), manifest.get("spec")
    if kind == "RayJob" and isinstance(spec, dict):
        if "rayClusterSpec" not in spec:
            raise RaypackError(
                f"{source}: the RayJob selects a cluster of its own (clusterSelector): check its manifest"
            )
        spec = spec["rayClusterSpec"]
    elif kind != "RayCluster":
        raise RaypackError(f"{source}: kind = {kind!r}: must be RayCluster or RayJob, with a spec")
    if not isinstance(spec, dict) or not isinstance(spec.get("headGroupSpec"), dict):
        raise RaypackError(f"{source}: the Ray cluster's spec has no headGroupSpec")
    return spec


def _as_autoscaler_config(source: str, manifest: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    # The only code that turns pod resources into Ray's, and what runs in the head pod.
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    spec = copy.deepcopy(spec)
    for group in spec.setdefault("workerGroupSpecs", []):
        if not spec.get("enableInTreeAutoscaling"):  # then nobody changes the number of pods
            group["minReplicas"] = group["maxReplicas"] = group.get("replicas", 0)
    name = manifest.get("metadata", {}).get("name", "ray")
    try:
        config: dict[str, Any] = _derive_autoscaling_config_from_ray_cr(
            {"metadata": {"name": name, "namespace": "default"}, "spec": spec}
        )
    except Exception as error:  # whatever Ray's code raises on a manifest that is not as it expects
        raise RaypackError(f"{source} is refused by Ray's autoscaler: {_named(error)}") from None
    return config


def _node_types(source: str, config: Mapping[str, Any]) -> tuple[NodeType, ...]:
    head = config["head_node_type"]
    types = []
    for name, each in config["available_node_types"].items():
        resources = each.get("resources") or {}
        if "CPU" not in resources:
            raise RaypackError(f"{source}: node type {name} does not say its CPUs: add resources: {{CPU: .., GPU: ..}}")
        one = 1 if name == head else 0
        types.append(
            NodeType(
                name=name,
                cpus=float(resources["CPU"]),
                gpus=float(resources.get("GPU", 0)),
                least=int(each.get("min_workers", 0)) + one,
                most=int(each.get("max_workers", 0)) + one,
            )
        )
    return tuple(types)


def _named(error: Exception) -> str:
    text = str(error).strip()
    return f"missing {text}" if isinstance(error, KeyError) else text or type(error).__name__
