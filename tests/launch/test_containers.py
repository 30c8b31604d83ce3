"""The recipes for containers: what they copy and install exists, and compose accepts its file."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.launch.launch_files import FILES, ROOT, changed, constraints, documents, shellcheck

tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")

DOCKERFILE = FILES / "docker" / "Dockerfile"
COMPOSE = FILES / "docker" / "compose.yaml"
DEFINITION = FILES / "apptainer" / "hvd-cluster.def"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with their arguments, without comments."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined if line)]


def sections() -> dict[str, str]:
    """The sections of the definition of Apptainer."""
    parts = re.split(r"^%(\w+)\n", DEFINITION.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def copied_by_docker() -> list[str]:
    from_outside = [rest for word, rest in instructions() if word == "COPY" and not rest.startswith("--from=")]
    return [source for rest in from_outside for source in rest.split()[:-1]]


def copied_by_apptainer() -> list[str]:
    return [line.split()[0] for line in sections()["files"].splitlines() if line.strip()]


@pytest.mark.parametrize("copied", [copied_by_docker, copied_by_apptainer], ids=["docker", "apptainer"])
def test_what_is_copied_is_there_and_is_all_that_the_package_needs(copied) -> None:
    setuptools = PROJECT["tool"]["setuptools"]
    packages = {pattern.rstrip("*") for pattern in setuptools["packages"]["find"]["include"]}
    commands = {f"{name.rpartition('.')[0].replace('.', '/')}.py" for name in setuptools["cmdclass"].values()}
    needed = {"pyproject.toml", "constraints.txt", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    assert set(copied()) == {*needed, *packages, *commands, "examples"}
    assert not [source for source in copied() if not (ROOT / source).exists()]


def test_docker_gets_what_is_copied_and_nothing_else() -> None:
    everything, *rest = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().split()
    assert everything == "*"
    assert sorted(each[1:] for each in rest if each.startswith("!")) == sorted(copied_by_docker())
    assert not [source for source in copied_by_docker() for each in rest if each[0] != "!" and fnmatch(source, each)]


def test_what_pip_installs_has_a_version() -> None:
    calls = [rest for word, rest in instructions() if word == "RUN" and rest.startswith("pip")]
    calls += [line for line in sections()["post"].splitlines() if line.strip().startswith("pip")]
    assert len(calls) == 3
    for call in calls:
        install, constraint, *packages = [word for word in shlex.split(call)[1:] if word != "--no-cache-dir"]
        assert (install, constraint, Path(packages[0]).name) == ("install", "--constraint", "constraints.txt")
        for package in packages[1:]:
            extras = re.fullmatch(r"\.\[(.+)\]", package.replace("${EXTRAS}", _argument("EXTRAS")))
            known = set(extras[1].split(",")) <= set(_extras()) if extras else package in constraints()
            assert known, package


def _argument(name: str) -> str:
    return next(rest.removeprefix(f"{name}=") for word, rest in instructions() if word == "ARG" and name in rest)


def _extras() -> dict[str, list[str]]:
    return PROJECT["project"]["optional-dependencies"]


def test_python_is_one_that_the_package_supports() -> None:
    images = {rest.split()[0] for word, rest in instructions() if word == "FROM"} - {"base"}
    images.remove(f"apache/spark:{constraints()['pyspark']}-python3")
    images.add(re.search("^From: (.*)$", DEFINITION.read_text(), re.MULTILINE)[1])
    assert images == {"python:3.11-slim-bookworm"}
    assert PROJECT["project"]["requires-python"] == ">=3.10"


def test_commands_in_the_recipes_have_their_scripts() -> None:
    text = DOCKERFILE.read_text() + COMPOSE.read_text() + DEFINITION.read_text()
    named = set(re.findall(r"examples/\w+\.py", text))
    assert named == {"examples/digits.py"}
    assert (ROOT / "examples" / "digits.py").exists()


def test_shellcheck_has_no_objection_to_the_recipes() -> None:
    parts = {name: sections()[name] for name in ("post", "environment", "runscript", "test")}
    runs = {f"RUN {n}": rest for n, (word, rest) in enumerate(instructions()) if word == "RUN"}
    assert len(runs) == 7
    # Apptainer runs its sections with -e.
    found = {name: shellcheck(f"#!/bin/sh -e\n{script}", "sh") for name, script in {**parts, **runs}.items()}
    assert not {name: told for name, told in found.items() if told}


def check_compose(path: Path) -> subprocess.CompletedProcess[str]:
    """The answer of check-jsonschema, which has the schema that Docker publishes."""
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_schema_of_compose() -> None:
    run = check_compose(COMPOSE)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_schema_of_compose_would_object(tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text(changed(COMPOSE, "depends_on:", "depend_on:"))
    run = check_compose(tmp_path / "compose.yaml")
    assert run.returncode == 1
    assert "depend_on" in run.stdout


def test_the_ranks_of_compose_are_a_world() -> None:
    (file,) = documents(COMPOSE)
    worlds = [service["environment"] for service in file["services"].values()]
    assert [world["RANK"] for world in worlds] == [str(rank) for rank in range(len(worlds))]
    assert {world["WORLD_SIZE"] for world in worlds} == {str(len(worlds))}
    assert {world["MASTER_ADDR"] for world in worlds} == {next(iter(file["services"]))}
    build = file["services"]["rank0"]["build"]
    assert (COMPOSE.parent / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).exists()
