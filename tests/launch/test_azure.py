"""The files for Azure ML: schemas accept them, and the inputs are the variables of the engine."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import yaml

from collectives.settings import UNUSED, Settings
from tests.launch.launch_files import FILES, ROOT, changed, documents, objections

FOLDER = FILES / "azure"
COMPONENT, PIPELINE = FOLDER / "component.yaml", FOLDER / "pipeline.yaml"
# Variables that launchers set, and users do not.
LAUNCHERS = {"RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME", "JOB_ID", "ROUND"} | {
    "GLOO_RENDEZVOUS_ADDR",
    "GLOO_RENDEZVOUS_PORT",
}
# Those of hvdrun and of Spark, which the launcher of Azure ML does without.
OF_OTHERS = {"START_TIMEOUT", "ELASTIC_TIMEOUT", "SPARK_START_TIMEOUT", "SPARK_PYTHONPATH", "SPARK_WORK_DIR"} | {
    "SPARK_USE_LOCAL_RANK_GPU_INDEX"
}
LOAD = """
import sys
from azure.ai.ml import load_component, load_job
results = load_component(sys.argv[1])._validate(), load_job(sys.argv[2])._validate()
sys.exit(str([str(result) for result in results if not result.passed]) if not all(r.passed for r in results) else 0)
"""
EXAMPLES = {"integer": "1", "number": "0.5", "string": "text"}
VALUES = {
    "cpu_operations": "gloo",
    "gpu_operations": "host",
    "controller": "gloo",
    "log_level": "info",
    "thread_affinity": "0",
} | {"gloo_iface": "lo"}


def knobs() -> dict[str, dict[str, str]]:
    """The inputs of the component that are variables."""
    (component,) = documents(COMPONENT)
    return {name: each for name, each in component["inputs"].items() if name != "epochs"}


def test_schemas_accept() -> None:
    assert objections(*documents(COMPONENT), "azure_component") == []
    assert objections(*documents(PIPELINE), "azure_pipeline") == []


@pytest.mark.parametrize(
    ("path", "schema", "old", "new"),
    [
        (COMPONENT, "azure_component", "type: mpi", "type: mpirun"),
        (COMPONENT, "azure_component", "type: integer", "type: int"),
        (COMPONENT, "azure_component", "process_count_per_instance: 4", "process_count_per_instance: four"),
        (COMPONENT, "azure_component", "code:", "environment_variables: {A: '1'}\ncode:"),
        (PIPELINE, "azure_pipeline", "component: ./component.yaml", "componnent: ./component.yaml"),
        (PIPELINE, "azure_pipeline", "azureml:cpu-cluster", "cpu-cluster"),
    ],
)
def test_schemas_would_object(path, schema, old, new) -> None:
    assert objections(yaml.safe_load(changed(path, old, new)), schema)


@pytest.mark.skipif(find_spec("azure") is None, reason="needs Azure's own package: pip install azure-ai-ml")
def test_azure_accepts() -> None:
    command = [sys.executable, "-c", LOAD, str(COMPONENT), str(PIPELINE)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert run.returncode == 0, run.stderr


def test_the_inputs_are_the_variables() -> None:
    """All that the engine reads but those of launchers, those of other launchers, and no more."""
    source = (ROOT / "collectives" / "settings.py").read_text()
    engine = {name for name in re.findall(r'"HOROVOD_([A-Z0-9_]+)"', source)} - LAUNCHERS
    assert {name.upper() for name in knobs()} == engine | OF_OTHERS
    assert len(knobs()) - len({"heartbeat_seconds", "gpu_operations"}) == 40


def test_the_command_sets_a_variable_for_each_input_that_a_job_gives() -> None:
    (component,) = documents(COMPONENT)
    optional = re.findall(r'\$\[\[(HOROVOD_[A-Z0-9_]+)="\$\{\{inputs\.(\w+)\}\}"\]\]', component["command"])
    assert [(f"HOROVOD_{name.upper()}", name) for name in knobs()] == optional
    assert all(knob["optional"] for knob in knobs().values())
    rest = re.sub(r"\$\[\[.*?\]\] ", "", component["command"])
    assert rest == "python digits.py --epochs ${{inputs.epochs}}"
    assert (FOLDER / component["code"] / "digits.py").exists()


def test_the_engine_takes_values_of_these_types() -> None:
    values = {name: VALUES.get(name, EXAMPLES[knob["type"]]) for name, knob in knobs().items()}
    settings = Settings.from_environment({f"HOROVOD_{name.upper()}": value for name, value in values.items()})
    assert settings.cpu_operations == "gloo"
    assert settings.cycle_time == 0.5 / 1000
    assert settings.timeouts.connect == 0.5


def test_an_input_says_truly_whether_it_has_an_effect() -> None:
    silent = {name.removeprefix("HOROVOD_") for name in UNUSED} | OF_OTHERS
    said = {name.upper() for name, knob in knobs().items() if knob["description"].startswith("no effect")}
    assert said == silent


def test_the_pipeline_gives_inputs_that_exist() -> None:
    (pipeline,) = documents(PIPELINE)
    step = pipeline["jobs"]["train"]
    assert (FOLDER / step["component"]).resolve() == COMPONENT
    assert set(step["inputs"]) <= {"epochs", *knobs()}
    assert step["inputs"]["epochs"] == "${{parent.inputs.epochs}}"
    assert "epochs" in pipeline["inputs"]
