"""The files for Spark on Kubernetes and on YARN: Spark's own classes have the settings, Kubernetes accepts the pods."""

from __future__ import annotations

import re
import shlex
import zipfile
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.launch.launch_files import FILES, changed, constraints, documents

KUBERNETES, YARN = FILES / "spark-kubernetes", FILES / "yarn"
SUBMITS = [KUBERNETES / "submit.sh", YARN / "submit.sh", YARN / "submit_elastic.sh"]
PODS = sorted(KUBERNETES.glob("*.yaml"))
JARS = ("spark-core", "spark-kubernetes", "spark-yarn", "spark-network-common")
# Any name of a variable follows these.
PREFIXES = ("spark.executorEnv.", "spark.yarn.appMasterEnv.")
VERSION = "1.37"


def confs(path: Path) -> dict[str, str]:
    """The settings that a script gives to spark-submit."""
    given = [word for word in shlex.split(path.read_text(), comments=True) if word.startswith("spark.")]
    # A setting in an array of bash ends with its bracket.
    return dict(word.rstrip(")").split("=", 1) for word in given)


@cache
def names_in_spark() -> bytes:
    """The classes of Spark that have the names of its settings."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        pytest.skip("PySpark is not installed")
    jars = [jar for name in JARS for jar in (Path(spec.origin).parent / "jars").glob(f"{name}_*.jar")]
    assert len(jars) == len(JARS)
    return b"\n".join(_classes(jar) for jar in jars)


def _classes(jar: Path) -> bytes:
    with zipfile.ZipFile(jar) as files:
        named = [name for name in files.namelist() if re.search(r"(onfig\w*|package|Conf|Client)\$?\.class$", name)]
        return b"\n".join(files.read(name) for name in named)


def knows(name: str) -> bool:
    """Whether Spark's classes have ``name``: as a constant, or as a prefix and a pattern ``<value>.rest``."""
    text = next((prefix for prefix in PREFIXES if name.startswith(prefix)), name)
    dots = [place for place, letter in enumerate(text) if letter == "."]
    parts = [(text,), *((text[:place], "\x01" + text[place:]) for place in dots)]
    return any(all(constant(part) in names_in_spark() for part in each) for each in parts)


def constant(text: str) -> bytes:
    """``text`` as a class file has it, with its length: so a part of a longer name does not count."""
    return len(text).to_bytes(2, "big") + text.encode()


@pytest.mark.parametrize("path", SUBMITS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_spark_has_the_settings(path: Path) -> None:
    assert len(confs(path)) > 3
    assert [name for name in confs(path) if not knows(name)] == []


def test_a_setting_that_spark_lacks_is_noticed() -> None:
    assert not knows("spark.kubernetes.executor.podTemplate.file")
    assert not knows("spark.decommision.enabled")


def test_settings_for_fixed_and_elastic_jobs() -> None:
    kubernetes, fixed, elastic = map(confs, SUBMITS)
    assert kubernetes["spark.dynamicAllocation.enabled"] == fixed["spark.dynamicAllocation.enabled"] == "false"
    assert kubernetes["spark.decommission.enabled"] == elastic["spark.dynamicAllocation.enabled"] == "true"
    assert all(each["spark.speculation"] == "false" for each in (kubernetes, fixed, elastic))


def accept(document: Mapping[str, object]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    pod = yaml.safe_load(yaml.safe_dump(document))
    for container in pod["spec"]["containers"]:
        container.setdefault("image", "of-spark")  # Spark gives it
    validate.validate(pod, VERSION, strict=True)


@pytest.mark.parametrize("path", PODS, ids=lambda path: path.stem)
def test_kubernetes_accepts_the_pods(path: Path) -> None:
    accept(*documents(path))


def test_kubernetes_would_object() -> None:
    error = pytest.importorskip("kubernetes_validate").ValidationError
    with pytest.raises(error, match="mountPoint"):
        accept(yaml.safe_load(changed(KUBERNETES / "executor.yaml", "mountPath", "mountPoint")))


def test_the_submit_script_fits_the_pods() -> None:
    text = (KUBERNETES / "submit.sh").read_text()
    (driver,) = documents(KUBERNETES / "driver.yaml")
    [container] = driver["spec"]["containers"]
    [mount] = container["volumeMounts"]
    [volume] = driver["spec"]["volumes"]
    assert f"local://{mount['mountPath']}/train.py" in text
    assert f"kubectl create configmap {volume['configMap']['name']} --from-file=train.py" in text
    assert {path.name for path in PODS} == set(re.findall(r"\w+\.yaml", text))
    # Spark looks for containers of these names.
    names = {container["name"] for path in PODS for container in documents(path)[0]["spec"]["containers"]}
    assert names == {"spark-kubernetes-driver", "spark-kubernetes-executor"}


def test_the_driver_stays_away_from_the_nodes_that_go() -> None:
    (driver,), (spot,) = documents(KUBERNETES / "driver.yaml"), documents(KUBERNETES / "executor_spot.yaml")
    [term] = driver["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    [key] = spot["spec"]["nodeSelector"]
    assert term["matchExpressions"] == [{"key": key, "operator": "DoesNotExist"}]
    assert [toleration["key"] for toleration in spot["spec"]["tolerations"]] == [key]


def test_the_image_has_the_spark_that_is_tested() -> None:
    recipe = (FILES / "docker" / "Dockerfile").read_text()
    assert f"apache/spark:{constraints()['pyspark']}-python3" in recipe
