"""
Manifests with which Kubernetes starts one pod for each node of a job. Pure.

Rules of this file: a manifest has no field that the job does not need. The fields and their reasons are those of the
page *Kubernetes*.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from attrs import field, frozen

from elasticlib.engines._filling import END_MARGIN
from elasticlib.errors import PREEMPTED, ConfigError
from elasticlib.spec import DEFAULT_PORT, TOKEN_VARIABLE

Manifest: TypeAlias = dict[str, Any]

_LABEL = (
    re.compile(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?"),
    "a name of lower-case letters, digits and hyphens, up to 42, that begins with a letter",
)
_NAMESPACE = (
    re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"),
    "a name of lower-case letters, digits and hyphens, up to 63",
)
_SECRET = (
    re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"),
    "a name of lower-case letters, digits, hyphens and dots, up to 253",
)
_IMAGE = re.compile(r"\S+"), "a container's image: registry/name:tag"
_JOB_INDEX = "JOB_GLOBAL_INDEX"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*"), "a variable's name, followed by =VALUE"
_RULES = (
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [PREEMPTED]}},
)
"""A pod that was evicted, or has saved before its end, is replaced without counting as a failure."""


@frozen(kw_only=True)
class PodSettings:
    """The settings of a job's pods; `check` them first."""

    name: str
    image: str
    min_nodes: int
    max_nodes: int
    arguments: tuple[str, ...]
    """Options of elasticrun, the program and its arguments."""
    gpus: int = 0
    """Of each node."""
    grace: int = 30
    """Seconds from SIGTERM to SIGKILL."""
    secret: str = ""
    """Name of a Secret with the key ``token``; "": the job has no token."""
    env: Mapping[str, str] = field(factory=dict)
    namespace: str = ""

    @property
    def nodes(self) -> str:
        """The value of --nnodes."""
        return str(self.max_nodes) if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"

    def check(self, kind: str) -> None:
        """Raise `ConfigError` for a value that Kubernetes would refuse."""
        _check("name", self.name, _LABEL)
        _check("image", self.image, _IMAGE)
        if self.namespace:
            _check("namespace", self.namespace, _NAMESPACE)
        if self.secret:
            _check("secret", self.secret, _SECRET)
        self._check_env(kind)
        for text in (*self.arguments, *self.env.values()):
            _check_text(text)
        if self.gpus < 0:
            raise ConfigError.of_setting("gpus", f"{self.gpus} must be 0 or more")
        if self.grace <= END_MARGIN:
            raise ConfigError.of_setting("grace", f"{self.grace} must be above {END_MARGIN:g} seconds")

        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ConfigError.of_setting("nodes", f"{self.nodes} must be a number, or a range, from 1 on")
        has_range = self.min_nodes != self.max_nodes
        if has_range and kind == "trainjob":
            raise ConfigError.of_setting("nodes", f"{self.nodes} must be one number: a TrainJob takes a fixed number")

    def _check_env(self, kind: str) -> None:
        for variable in self.env:
            _check("env", variable, _VARIABLE)
        # A pod with two values of one variable would take one of them silently.
        if self.secret and TOKEN_VARIABLE in self.env:
            raise ConfigError.of_setting("env", f"{TOKEN_VARIABLE!r} is set from the secret: leave one of them out")
        if kind == "jobset" and _JOB_INDEX in self.env:
            raise ConfigError.of_setting("env", f"{_JOB_INDEX!r} is set by the manifest: leave it out")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{text!r} is not UTF-8, as texts of a manifest must be: give other bytes") from None


def _check(setting: str, value: str, rule: tuple[re.Pattern[str], str]) -> None:
    pattern, meaning = rule
    if not pattern.fullmatch(value):
        raise ConfigError.of_setting(setting, f"{value!r} must be {meaning}")


def manifest_of(kind: str, settings: PodSettings) -> Manifest:
    """Return the manifest of a checked job as a ``List``; *kind* is a key of `MANIFEST_KINDS`."""
    return {"apiVersion": "v1", "kind": "List", "items": MANIFEST_KINDS[kind](settings)}


def _indexed_job(settings: PodSettings) -> list[Manifest]:
    """Return a Job with one pod for each index, and the Service that gives the pods their names."""
    service = {
        "clusterIP": "None",
        # Names must resolve before the pods are ready.
        "publishNotReadyAddresses": True,
        "selector": {"job-name": settings.name},
    }
    endpoint = f"{settings.name}-0.{settings.name}:{DEFAULT_PORT}"
    pod = {"subdomain": settings.name, **_pod(settings, endpoint)}
    job = _job_spec(settings.max_nodes, pod)
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(settings), "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(settings), "spec": job},
    ]


def _job_set(settings: PodSettings) -> list[Manifest]:
    """Return a JobSet with one Job of one pod for each node."""
    # Each job of the set numbers its pods from 0.
    path = "metadata.labels['jobset.sigs.k8s.io/job-global-index']"
    index = {"name": _JOB_INDEX, "valueFrom": {"fieldRef": {"fieldPath": path}}}
    pod = _pod(settings, f"{settings.name}-node-0-0.{settings.name}:{DEFAULT_PORT}", index)
    nodes = {"name": "node", "replicas": settings.max_nodes, "template": {"spec": _job_spec(1, pod)}}
    spec = {"network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True}, "replicatedJobs": [nodes]}
    return [
        {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _metadata(settings), "spec": spec},
    ]


def _train_job(settings: PodSettings) -> list[Manifest]:
    """Return a TrainJob, whose runtime sets the variables for the place of each pod."""
    trainer: Manifest = {
        "image": settings.image,
        "numNodes": settings.max_nodes,
        "command": ["elasticrun", *_grace_option(settings), *map(_literal, settings.arguments)],
        "env": _env(settings),
    }
    if settings.gpus:
        trainer["resourcesPerNode"] = _resources(settings)
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": _metadata(settings),
            "spec": spec,
        }
    ]


MANIFEST_KINDS: Mapping[str, Callable[[PodSettings], list[Manifest]]] = MappingProxyType(
    {"job": _indexed_job, "jobset": _job_set, "trainjob": _train_job}
)
"""The resources for a job by their names on the command line."""


def _metadata(settings: PodSettings) -> Manifest:
    return {"name": settings.name, **({"namespace": settings.namespace} if settings.namespace else {})}


def _job_spec(pods: int, pod: Manifest) -> Manifest:
    return {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": list(_RULES)},
        "template": {"spec": pod},
    }


def _pod(settings: PodSettings, endpoint: str, *variables: Manifest) -> Manifest:
    place = ["--nnodes", settings.nodes, "--nproc-per-node", "auto"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", settings.name]
    container: Manifest = {
        "name": "train",
        "image": settings.image,
        "command": ["elasticrun", *place, *meeting, *_grace_option(settings), *map(_literal, settings.arguments)],
        "env": [*variables, *_env(settings)],
    }
    if settings.gpus:
        container["resources"] = _resources(settings)
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": settings.grace,
        "containers": [container],
    }


def _grace_option(settings: PodSettings) -> list[str]:
    return ["--shutdown-timeout", f"{settings.grace - END_MARGIN:g}"]


def _literal(text: str) -> str:
    """Return *text* such that a pod gets it unchanged: Kubernetes replaces ``$(NAME)``, and takes ``$$`` for ``$``."""
    return text.replace("$", "$$")


def _env(settings: PodSettings) -> list[Manifest]:
    found: list[Manifest] = [{"name": name, "value": _literal(value)} for name, value in settings.env.items()]
    if settings.secret:
        found.append({"name": TOKEN_VARIABLE, "valueFrom": {"secretKeyRef": {"name": settings.secret, "key": "token"}}})
    return found


def _resources(settings: PodSettings) -> Manifest:
    return {"limits": {"nvidia.com/gpu": str(settings.gpus)}}
