"""`cluster.yaml`: valid by Ray's own schema and the cloud's API model, and able to hold the run that it is for."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from raypack.config import TopologySection, preset_or_file

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
HEALTH = ("initial_delay_ms", "period_ms", "timeout_ms", "failure_threshold")


@pytest.fixture
def cluster() -> dict[str, Any]:
    return yaml.safe_load(TEXT)


def _validate(config: dict[str, Any]) -> dict[str, Any]:
    """What `ray up` does before it asks the cloud for anything."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


def test_ray_accepts_it(cluster: dict[str, Any]) -> None:
    prepared = _validate(cluster)
    assert prepared["head_node_type"] == "head"


@pytest.mark.parametrize(
    "break_it",
    [
        lambda c: c.update(max_worker=8),
        lambda c: c["available_node_types"]["gpu"].update(min_worker=1),
        lambda c: c.update(head_node_type="hat"),
        lambda c: c["available_node_types"]["gpu"].update(min_workers=9),
        lambda c: c["provider"].update(type="awss"),
    ],
    ids=["key", "node-key", "head", "min-over-max", "provider"],
)
def test_the_check_notices_mistakes(cluster: dict[str, Any], break_it: Any) -> None:
    from jsonschema import ValidationError

    break_it(cluster)
    with pytest.raises((ValidationError, ValueError, NotImplementedError)):
        _validate(cluster)


def test_gpu_nodes_scale_between_two_limits_and_the_head_offers_nothing(cluster: dict[str, Any]) -> None:
    types = cluster["available_node_types"]
    head = types.pop(cluster["head_node_type"])
    assert head["resources"] == {"CPU": 0}
    assert types
    for kind in types.values():
        assert kind["resources"]["GPU"] > 0
        assert kind["min_workers"] < kind["max_workers"] <= cluster["max_workers"]


def _gpu_topology() -> TopologySection:
    return TopologySection.model_validate(preset_or_file("runs", "1f3s_gpu")["topology"])


def test_it_can_hold_every_worker_of_the_gpu_run(cluster: dict[str, Any]) -> None:
    topology = _gpu_topology()
    kind = cluster["available_node_types"]["gpu"]["resources"]
    on_a_node = int(min(kind["GPU"] // topology.gpus_per_worker, kind["CPU"] // max(1, topology.cpus_per_worker)))
    assert on_a_node * cluster["available_node_types"]["gpu"]["max_workers"] >= topology.workers


def test_every_node_has_the_same_settings_where_they_must_agree(cluster: dict[str, Any]) -> None:
    head, worker = (" ".join(cluster[f"{kind}_start_ray_commands"]) for kind in ("head", "worker"))
    for name in ("RAY_AUTH_MODE", "RAYPACK_HOME", *(f"RAY_health_check_{setting}" for setting in HEALTH)):
        found = [re.findall(rf"\b{name}=(\S+?)[;\s]", text) for text in (head, worker)]
        assert found[0] == found[1]
        assert len(found[0]) == 1
    assert "RAY_AUTH_MODE=token" in head
    assert "~/.ray/auth_token" in cluster["file_mounts"]
    assert "--dashboard-host=127.0.0.1" in head, "the job API is reached through `ray dashboard`, not from outside"


def test_a_lost_node_is_noticed_well_before_workers_give_up_starting(cluster: dict[str, Any]) -> None:
    head = " ".join(cluster["head_start_ray_commands"])
    ms = {name: int(re.search(rf"health_check_{name}=(\d+)", head)[1]) for name in HEALTH}
    noticed = (ms["period_ms"] + ms["timeout_ms"]) * ms["failure_threshold"] / 1000
    assert noticed <= 10


def test_jobs_lie_where_the_entrypoint_starts_and_nothing_large_is_copied(cluster: dict[str, Any]) -> None:
    mounts = cluster["file_mounts"]
    assert mounts["~/jobs"] == "./jobs"
    commands = cluster["head_start_ray_commands"]
    assert not any(re.search(r"\bcd\b", command) for command in commands), "ray starts in the home directory"
    left_out = {pattern.split("/")[-1] for pattern in cluster["rsync_exclude"]}
    assert {".git", ".venv", "runs", "corpora", "shared"} <= left_out
    for local in mounts.values():
        assert local.startswith(("./", "~")) or local == "."


def test_metrics_are_at_the_same_port_of_every_node(cluster: dict[str, Any]) -> None:
    for kind in ("head", "worker"):
        assert "--metrics-export-port=8080" in " ".join(cluster[f"{kind}_start_ray_commands"])


def test_machine_images_are_the_users_and_not_the_outdated_default(cluster: dict[str, Any]) -> None:
    for kind in cluster["available_node_types"].values():
        assert re.fullmatch(r"ami-[0-9a-f]{17}", kind["node_config"]["ImageId"])


def test_images_have_the_locked_ray_and_python(cluster: dict[str, Any]) -> None:
    lock = (ROOT / "requirements-cpu.lock").read_text(encoding="utf-8")
    ray_version = re.search(r"^ray==(\S+)$", lock, re.MULTILINE)[1]
    torch_version = re.search(r"^torch==(\S+)$", lock, re.MULTILINE)[1]
    for image in (cluster["docker"]["head_image"], cluster["docker"]["worker_image"]):
        assert image.split(":")[1].startswith(f"{ray_version}-py311")
    assert any(f"torch=={torch_version}" in command for command in cluster["setup_commands"])


@pytest.fixture(scope="module")
def ec2_model() -> Any:
    """The cloud's own description of its API, which the client package ships."""
    session = pytest.importorskip("botocore.session", reason="boto3 is not installed")
    return session.get_session().get_service_model("ec2")


def test_instance_types_exist(cluster: dict[str, Any], ec2_model: Any) -> None:
    known = set(ec2_model.shape_for("InstanceType").enum)
    for kind in cluster["available_node_types"].values():
        assert kind["node_config"]["InstanceType"] in known


def _examples() -> list[dict[str, Any]]:
    """The YAML examples of docs/cluster.md that are settings of an EC2 node."""
    text = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    return [block["node_config"] for block in blocks if isinstance(block, dict) and "node_config" in block]


def test_examples_in_the_docs_are_parameters_of_the_launch_call(ec2_model: Any) -> None:
    from botocore.validate import ParamValidator

    shape = ec2_model.operation_model("RunInstances").input_shape
    examples = _examples()
    assert examples
    for given in examples:
        report = ParamValidator().validate(given | {"MinCount": 1, "MaxCount": 1}, shape)
        assert not report.has_errors(), report.generate_report()


def test_node_settings_are_parameters_of_the_launch_call(cluster: dict[str, Any], ec2_model: Any) -> None:
    from botocore.validate import ParamValidator

    shape = ec2_model.operation_model("RunInstances").input_shape
    for kind in cluster["available_node_types"].values():
        given = kind["node_config"] | {"MinCount": 1, "MaxCount": 1}
        report = ParamValidator().validate(given, shape)
        assert not report.has_errors(), report.generate_report()
        misspelt = given | {"BlockDeviceMapings": []}
        assert ParamValidator().validate(misspelt, shape).has_errors()
