"""The manifests of the page *Kubernetes* fit the published schemas, and their commands train as two pods would."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import elasticlib
from tests.process.launches import environment, free_port

jsonschema = pytest.importorskip("jsonschema")
yaml = pytest.importorskip("yaml")

PAGE = Path(elasticlib.__file__).parent / "docs" / "kubernetes.md"
SCHEMAS = Path(__file__).parent / "schemas"
LIMIT = 120.0
PODS = 2
TRAIN = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"node {os.environ['GROUP_RANK']} trained with {total.item():g} ranks\\n", end="", flush=True)
"""


def manifests() -> list[dict[str, Any]]:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [manifest for block in blocks for manifest in yaml.safe_load_all(block)]


def validator(kind: str) -> Any:
    for path in SCHEMAS.glob("*.json"):
        published = json.loads(path.read_text())
        if kind in published["kinds"]:
            schema = {"$ref": f"#/$defs/{published['kinds'][kind]}", "$defs": published["$defs"]}
            return jsonschema.Draft202012Validator(schema)
    raise AssertionError(f"no schema of {kind}")


def errors(manifest: dict[str, Any]) -> list[str]:
    return [error.message for error in validator(manifest["kind"]).iter_errors(manifest)]


@pytest.mark.parametrize("manifest", manifests(), ids=lambda manifest: manifest["kind"])
def test_manifest_fits_its_published_schema(manifest: dict[str, Any]) -> None:
    assert [] == errors(manifest)


@pytest.mark.parametrize("manifest", manifests(), ids=lambda manifest: manifest["kind"])
def test_schema_refuses_an_unknown_field(manifest: dict[str, Any]) -> None:
    wrong = copy.deepcopy(manifest)
    wrong["spec"]["unknown"] = 1

    assert errors(wrong)


def printed(*args: str) -> list[dict[str, Any]]:
    """Return the manifests that ``elasticrun manifest`` prints."""
    command = [sys.executable, "-m", "elasticlib.run", "manifest", "--image", "registry.example.com/train", *args]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment(), timeout=LIMIT)
    items: list[dict[str, Any]] = json.loads(result.stdout)["items"]
    return items


OPTIONS = ("--nodes", "2", "--secret", "train", "--", "--max-restarts", "3", "train.py")
FULL = ("--nodes", "2", "--gpus", "8", "--grace", "120", "--namespace", "ml", "--env", "A=1", "train.py", "--lr", "3")


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("options", [OPTIONS, FULL], ids=["few", "all"])
def test_printed_manifest_fits_its_published_schema(kind: str, options: tuple[str, ...]) -> None:
    assert {"job": 2}.get(kind, 1) == len(found := printed("--kind", kind, *options))
    assert [] == [error for manifest in found for error in errors(manifest)]


def test_a_range_of_nodes_makes_as_many_pods_as_may_take_part() -> None:
    _, job = printed("--nodes", "2:4", "train.py")

    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert (4, 4) == (job["spec"]["completions"], job["spec"]["parallelism"])
    assert ["elasticrun", "--nnodes", "2:4"] == command[:3]


def containers(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By kind of manifest: what the container of its pods is."""
    specs = {manifest["kind"]: manifest["spec"] for manifest in found}
    job_set = specs["JobSet"]["replicatedJobs"][0]["template"]["spec"]
    return {
        "Job": specs["Job"]["template"]["spec"]["containers"][0],
        "JobSet": job_set["template"]["spec"]["containers"][0],
        "TrainJob": specs["TrainJob"]["trainer"],
    }


def variables(kind: str, pod: int, port: int) -> dict[str, str]:
    """Return the variables that Kubernetes and the operator of *kind* set in this pod."""
    of_kind = {
        "Job": {"JOB_COMPLETION_INDEX": str(pod)},
        "JobSet": {"JOB_COMPLETION_INDEX": "0"},
        "TrainJob": {
            "JOB_COMPLETION_INDEX": str(pod),
            "PET_NNODES": str(PODS),
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(pod),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
        },
    }
    return of_kind[kind]


def declared(container: dict[str, Any], pod: int) -> dict[str, str]:
    """The variables that the manifest declares, with the values that Kubernetes would look up."""
    values = {
        "metadata.labels['jobset.sigs.k8s.io/job-global-index']": str(pod),
        "token": "secret",
    }
    sources = {each["name"]: each["valueFrom"] for each in container["env"]}
    return {
        name: values[source["fieldRef"]["fieldPath"] if "fieldRef" in source else source["secretKeyRef"]["key"]]
        for name, source in sources.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Job", "JobSet", "TrainJob"])
@pytest.mark.parametrize("source", ["page", "command"])
def test_command_of_a_manifest_trains_in_two_pods(kind: str, source: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    every = manifests()
    if source == "command":
        every = [each for name in ("job", "jobset", "trainjob") for each in printed("--kind", name, *OPTIONS)]
    container, port = containers(every)[kind], free_port()
    # Names of pods resolve in a cluster only.
    command = [re.sub(r"^train-[\w.-]+:\d+$", f"127.0.0.1:{port}", argument) for argument in container["command"]]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    pods = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment(PATH=path, OMP_NUM_THREADS="1", **variables(kind, pod, port), **declared(container, pod)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for pod in range(PODS)
    ]
    try:
        outputs = [pod.communicate(timeout=LIMIT)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()

    assert [0, 0] == [pod.returncode for pod in pods], "\n".join(outputs)
    for number, text in enumerate(outputs):
        assert re.search(rf"node {number} trained with \d+ ranks", text), text
