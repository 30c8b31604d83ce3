"""The manifests for Kubernetes: schemas accept them, and their numbers and names agree.

kubernetes-validate has the schemas of Kubernetes. Those of MPIJob and RayJob are reduced, see their first lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.launch_files import FILES, ROOT, changed, constraints, documents, image_user, objections

kubernetes_validate = pytest.importorskip("kubernetes_validate")

FOLDER = FILES / "kubernetes"
NAMES = ("job", "mpijob", "rayjob", "rayjob_elastic")
JOB, MPI_JOB, RAY_JOB, ELASTIC_RAY_JOB = (FOLDER / f"{name}.yaml" for name in NAMES)
REDUCED = {"MPIJob": "mpijob", "RayJob": "rayjob"}
VERSION = "1.37"


def problems(text: str) -> list[str]:
    """What the schemas have against the manifests in ``text``."""
    return [problem for document in yaml.safe_load_all(text) for problem in _problems(document)]


def _problems(document: dict[str, Any]) -> Iterator[str]:
    if document["kind"] not in REDUCED:
        yield from _native(document)
        return
    yield from objections(document, REDUCED[document["kind"]])
    for template in _templates(document["spec"]):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
        yield from _native(pod)


def _native(document: dict[str, Any]) -> Iterator[str]:
    try:
        kubernetes_validate.validate(document, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield error.message


def _templates(value: Any) -> Iterator[dict[str, Any]]:
    """The templates of pods in ``value``, at any depth."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "template":
                yield each
            else:
                yield from _templates(each)
    elif isinstance(value, list):
        for each in value:
            yield from _templates(each)


@pytest.mark.parametrize("path", [JOB, MPI_JOB, RAY_JOB, ELASTIC_RAY_JOB], ids=lambda path: path.name)
def test_schemas_accept(path: Path) -> None:
    assert problems(path.read_text()) == []


@pytest.mark.parametrize(
    ("path", "old", "new", "told"),
    [
        (JOB, "parallelism: 4", "paralelism: 4", "paralelism"),
        (JOB, 'value: "4"', "value: 4", "is not"),
        (JOB, "clusterIP: None", "clusterIP: [None]", "is not"),
        (MPI_JOB, "slotsPerWorker: 2", 'slotsPerWorker: "2"', "slotsPerWorker"),
        (MPI_JOB, "cleanPodPolicy: Running", "cleanPodPolicy: Sometimes", "Sometimes"),
        (MPI_JOB, "fsGroup: 1000", "fsGrup: 1000", "fsGrup"),
        (RAY_JOB, "entrypoint:", "entryPoint:", "entryPoint"),
        (RAY_JOB, 'num-cpus: "0"', "num-cpus: 0", "num-cpus"),
        (RAY_JOB, "mountPath:", "mountpath:", "mountPath"),
        (ELASTIC_RAY_JOB, "upscalingMode: Default", "upscalingMode: Fast", "Fast"),
        (ELASTIC_RAY_JOB, "idleTimeoutSeconds: 60", "idleTimeoutSecond: 60", "idleTimeoutSecond"),
        (ELASTIC_RAY_JOB, "operator: Equal", "operater: Equal", "operater"),
        (ELASTIC_RAY_JOB, "terminationGracePeriodSeconds: 45", "terminationGracePeriod: 45", "terminationGracePeriod"),
    ],
)
def test_schemas_would_object(path: Path, old: str, new: str, told: str) -> None:
    found = problems(changed(path, old, new))
    assert any(told in each for each in found), found


def test_the_pods_of_the_job_are_a_world() -> None:
    service, job = documents(JOB)
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    variables = {each["name"]: each for each in pod["containers"][0]["env"]}
    assert spec["completions"] == spec["parallelism"] == int(variables["WORLD_SIZE"]["value"])
    assert variables["RANK"]["valueFrom"]["fieldRef"]["fieldPath"].endswith("job-completion-index']")
    assert variables["MASTER_ADDR"]["value"] == f"{name}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    assert variables["OMP_NUM_THREADS"]["value"] == pod["containers"][0]["resources"]["limits"]["cpu"]


def test_the_secret_of_the_job_is_the_one_that_the_first_line_makes() -> None:
    made = re.search(r"create secret generic (\S+) --from-literal=(\w+)=", JOB.read_text())
    container = documents(JOB)[1]["spec"]["template"]["spec"]["containers"][0]
    used = next(each for each in container["env"] if each["name"] == "HOROVOD_SECRET_KEY")["valueFrom"]["secretKeyRef"]
    assert (used["name"], used["key"]) == (made[1], made[2])


def test_the_numbers_of_the_mpi_job_agree() -> None:
    (job,) = documents(MPI_JOB)
    replicas = job["spec"]["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    (worker,) = replicas["Worker"]["template"]["spec"]["containers"]
    slots = job["spec"]["slotsPerWorker"]
    assert launcher["args"][:2] == ["-np", str(replicas["Worker"]["replicas"] * slots)]
    assert launcher["env"] == [
        {"name": "OMP_NUM_THREADS", "value": str(int(worker["resources"]["limits"]["cpu"]) // slots)}
    ]


def test_the_mpi_job_fits_its_image() -> None:
    recipe = (FILES / "docker" / "Dockerfile").read_text()
    (job,) = documents(MPI_JOB)
    (worker,) = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert f"HostKey {job['spec']['sshAuthMountPath']}/id_rsa" in recipe
    assert f"> {worker['args'][-1]}" in recipe
    pods = [template["spec"]["securityContext"] for template in _templates(job["spec"])]
    assert pods == [{"runAsUser": image_user(), "fsGroup": image_user()}] * 2
    assert documents(JOB)[1]["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == image_user()


def test_the_scripts_of_the_manifests_are_in_the_image() -> None:
    named = [re.search(r"examples/\w+\.py", path.read_text())[0] for path in (JOB, MPI_JOB)]
    assert [name for name in named if (ROOT / name).exists()] == named


def test_the_ray_job_fits_its_cluster() -> None:
    code, job = documents(RAY_JOB)
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    head = cluster["headGroupSpec"]["template"]["spec"]
    (folder,) = [mount["mountPath"] for mount in head["containers"][0]["volumeMounts"]]
    assert cluster["rayVersion"] == constraints()["ray"]
    assert job["spec"]["entrypoint"] == f"python {folder}/{next(iter(code['data']))}"
    assert f"num_workers={workers['replicas']}" in code["data"]["train.py"]
    assert [volume["configMap"]["name"] for volume in head["volumes"]] == [code["metadata"]["name"]]
    assert workers["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "1"


def elastic_groups() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The head, and the groups of workers by name."""
    cluster = documents(ELASTIC_RAY_JOB)[1]["spec"]["rayClusterSpec"]
    return cluster["headGroupSpec"], {group["groupName"]: group for group in cluster["workerGroupSpecs"]}


def test_the_elastic_ray_job_fits_its_cluster() -> None:
    code, job = documents(ELASTIC_RAY_JOB)
    cluster = job["spec"]["rayClusterSpec"]
    head, groups = elastic_groups()
    head = head["template"]["spec"]
    [folder] = [mount["mountPath"] for mount in head["containers"][0]["volumeMounts"]]
    assert cluster["rayVersion"] == constraints()["ray"]
    assert cluster["enableInTreeAutoscaling"] is True
    assert job["spec"]["entrypoint"] == f"python {folder}/{next(iter(code['data']))}"
    assert [volume["configMap"]["name"] for volume in head["volumes"]] == [code["metadata"]["name"]]
    least, most = (sum(group[f"{end}Replicas"] for group in groups.values()) for end in ("min", "max"))
    assert f"num_workers={most}, min_workers={least}, max_workers={most}" in code["data"]["train.py"]
    for group in groups.values():
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "1"
    compile(code["data"]["train.py"], "train.py", "exec")


def test_the_head_and_the_base_stay_away_from_the_nodes_that_go() -> None:
    head, groups = elastic_groups()
    [(key, value)] = groups["spot"]["template"]["spec"]["nodeSelector"].items()
    [toleration] = groups["spot"]["template"]["spec"]["tolerations"]
    assert (toleration["key"], toleration["value"]) == (key, value)
    for group in (head, groups["base"]):
        affinity = group["template"]["spec"]["affinity"]["nodeAffinity"]
        [term] = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert term["matchExpressions"] == [{"key": key, "operator": "DoesNotExist"}]


def test_a_pod_on_a_spot_node_drains_before_it_is_killed() -> None:
    ray = find_spec("ray")
    if ray is None or ray.origin is None:
        pytest.skip("Ray is not installed")
    _, groups = elastic_groups()
    pod = groups["spot"]["template"]["spec"]
    [variable] = pod["containers"][0]["env"]
    assert variable["name"] in (Path(ray.origin).parent / "_private" / "ray_constants.py").read_text()
    assert 0 < float(variable["value"]) < pod["terminationGracePeriodSeconds"]
