"""Which paths of a cluster file are storage that every node shares, and where RAYPACK_HOME is.

A heuristic over commands and volumes: it can say that a path is not mounted, never that what is mounted there works.
Pairs of paths are `(surely shared, there on every node)`; the second kind are host directories.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

#: programs that mount a file system or a bucket at their last path
MOUNT_PROGRAMS = {"mount", "mount-s3", "gcsfuse", "s3fs", "goofys", "blobfuse2", "juicefs", "sshfs"}
#: volumes of a pod that are the same storage wherever the pod runs
SHARED_VOLUMES = {"persistentVolumeClaim", "nfs", "csi", "cephfs", "glusterfs", "azureFile", "flexVolume"}
HOME = re.compile(r"\bRAYPACK_HOME=[\"']?([^\s;&\"']+)")
Paths = tuple[tuple[str, ...], tuple[str, ...]]


def launcher_paths(config: Mapping[str, Any]) -> Paths:
    """Shared paths of a Ray cluster launcher file, as Ray's processes see them (inside the container, if one is used).

    A container sees a mount of its host only through a volume. Where no command mounts anything, the machine image may
    do it: such volumes count as unsure.
    """
    head, worker = (_launcher_node(config, kind) for kind in ("head", "worker"))
    return _on_all([head, worker])


def launcher_home(config: Mapping[str, Any]) -> str:
    """RAYPACK_HOME where Ray is started; empty unless it is the same on the head and on the workers."""
    docker = config.get("docker") or {}
    found = set()
    for kind in ("head", "worker"):
        commands = [*(config.get(f"{kind}_start_ray_commands") or []), *_options(docker, kind)]
        named = [match[1] for command in commands for match in HOME.finditer(str(command))]
        found.add(named[-1] if named else "")
    return found.pop() if len(found) == 1 else ""


def pod_paths(pods: Sequence[Mapping[str, Any]]) -> Paths:
    """Shared paths of the pods of a KubeRay manifest: the same volume at the same path in every pod's Ray container."""
    return _on_all([_pod_node(pod) for pod in pods])


def pod_home(pods: Sequence[Mapping[str, Any]]) -> str:
    """RAYPACK_HOME of the Ray containers; empty unless it is the same in all of them."""
    found = set()
    for pod in pods:
        env = pod["containers"][0].get("env") or []
        found.add(next((str(each.get("value", "")) for each in env if each.get("name") == "RAYPACK_HOME"), ""))
    return found.pop() if len(found) == 1 else ""


def _on_all(nodes: Sequence[Mapping[str, str]]) -> Paths:
    """`nodes`: {path: what is there}; an empty text = a directory of the host."""
    first, others = nodes[0], nodes[1:]
    same = [path for path in first if all(other.get(path) == first[path] for other in others)]
    return tuple(path for path in same if first[path]), tuple(path for path in same if not first[path])


def _launcher_node(config: Mapping[str, Any], kind: str) -> dict[str, str]:
    docker = config.get("docker") or {}
    on_host = mount_points(config.get("initialization_commands") or [])
    if not docker:
        later = [*(config.get("setup_commands") or []), *(config.get(f"{kind}_setup_commands") or [])]
        return dict.fromkeys((*on_host, *mount_points(later)), "mounted")
    seen = {}
    for outside, inside in volumes(_options(docker, kind)):
        if any(outside == top or outside.startswith(top + "/") for top in on_host):
            seen[inside] = "mounted"
        elif not on_host:
            seen[inside] = ""
    return seen


def _options(docker: Mapping[str, Any], kind: str) -> list[str]:
    return [str(option) for key in ("run_options", f"{kind}_run_options") for option in docker.get(key) or []]


def mount_points(commands: Iterable[str]) -> list[str]:
    """Where shell commands mount something: `mount -t nfs4 server:/ /mnt/data` -> `/mnt/data`."""
    found = []
    for command in commands:
        for words in _simple_commands(str(command)):
            programs = [posixpath.basename(word) for word in words if not word.startswith("-")]
            program = next((word for word in programs if word != "sudo" and "=" not in word), "")
            paths = [word for word in words[1:] if word.startswith("/")]
            if paths and (program in MOUNT_PROGRAMS or program.startswith("mount.")):
                found.append(posixpath.normpath(paths[-1]))
    return found


def _simple_commands(command: str) -> list[list[str]]:
    """The words of each command of a shell line, split at ; & | and line ends."""
    lexer = shlex.shlex(command.replace("\n", ";"), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    simple: list[list[str]] = [[]]
    try:
        for word in lexer:
            if set(word) <= set("();<>|&"):
                simple.append([])
            else:
                simple[-1].append(word)
    except ValueError:  # an open quote: not a line that this can read
        return []
    return [words for words in simple if words]


def volumes(options: Iterable[str]) -> list[tuple[str, str]]:
    """`(host path, container path)` of docker's run options: `-v /a:/b:ro`, `--volume=/a:/b`, `--mount ..`."""
    found, words = [], []
    for word in " ".join(options).split():
        words += word.split("=", 1) if word.startswith("--") else [word]
    for flag, value in pairwise(words):
        if flag in ("-v", "--volume"):
            outside, _, rest = value.partition(":")
            inside = rest.split(":")[0]
        elif flag == "--mount":
            parts = dict(part.partition("=")[::2] for part in value.split(","))
            outside = parts.get("source", parts.get("src", ""))
            inside = parts.get("target", parts.get("dst", parts.get("destination", "")))
        else:
            continue
        if outside.startswith("/") and inside.startswith("/"):
            found.append((posixpath.normpath(outside), posixpath.normpath(inside)))
    return found


def _pod_node(pod: Mapping[str, Any]) -> dict[str, str]:
    sources = {}
    for volume in pod.get("volumes") or []:
        kind = next((key for key in volume if key != "name"), "")
        if kind in SHARED_VOLUMES:
            sources[volume["name"]] = json.dumps({kind: volume[kind]}, sort_keys=True)
        elif kind == "hostPath":
            sources[volume["name"]] = ""
    seen = {}
    for mount in pod["containers"][0].get("volumeMounts") or []:
        source = sources.get(mount.get("name"))
        if source is not None:
            place = f"{source} {mount.get('subPath', '')}" if source else ""
            seen[posixpath.normpath(mount["mountPath"])] = place
    return seen
