"""Flags and signatures are those of Horovod, as data/horovod_0_28.yaml lists them; each difference has a reason."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import yaml

from executors.agents.hosts.job import resolve_start_timeout
from executors.job.elastic_arguments import ElasticArguments, resolve_limits
from hvd_cluster.cli.command_line import _parser
from hvd_cluster.cli.flags import all_flags
from hvd_cluster.cli.hvdrun import main
from hvd_cluster.cli.values import LEVELS

TABLE = yaml.safe_load((Path(__file__).parent / "data" / "horovod_0_28.yaml").read_text())
FLAGS = {flag["options"][-1]: flag for flag in TABLE["flags"]}
# The groups of our help that take the place of Horovod's.
GROUPS = {
    "general": "options",
    "controller": "options",
    "ssh": "hosts",
    "hosts": "hosts",
    "tuneable": "parameters",
    "autotune": "autotuning",
    "elastic": "elastic jobs",
    "timeline": "timeline",
    "stall": "stalls",
    "library": "libraries",
    "logging": "log",
}
ELASTIC_TIMEOUT = "None is HOROVOD_ELASTIC_TIMEOUT, or else 600, as in hvdrun"
DIFFERENCES = {
    "run": {
        "num_proc is None, not 1": "None is min_num_proc where that is given, or else 1",
        "remote_shell is added": "hosts without ssh, such as containers",
        "elastic_timeout is added": "hvdrun has it, too",
        "grace_seconds is added": "hvdrun has it, too",
        "dashboard is added": "hvdrun has it, too",
        "env is added": "variables of the ranks; horovod.spark.run has this argument",
    },
    "RayExecutor": {
        "elastic_timeout is None, not 600": ELASTIC_TIMEOUT,
        "label_selector is added": "the nodes of the workers, by Ray's labels",
        "bundle_label_selector is added": "the same for each worker",
        "resources_per_worker is added": "Ray's resources besides CPU and GPU",
        "placement_strategy is added": "Ray's placement strategies",
        "runtime_env is added": "Ray's environment of processes",
        "dashboard is added": "the live page",
    },
    "RayExecutor.run": {"datasets is added": "the rows of each rank, from Ray Data"},
    "RayExecutor.create_settings": {"discovery is added": "for override_discovery=False"},
    "ElasticRayExecutor.create_settings": {"elastic_timeout is None, not 600": ELASTIC_TIMEOUT},
}


def flag_differences(flag):
    """How the flag of hvdrun differs."""
    actions = _parser()._option_string_actions
    for option in (*flag["options"], *flag.get("off", ())):
        action = actions.get(option)
        if action is None:
            yield f"{option} is missing"
        elif (values := 1 if action.nargs is None else action.nargs) != flag.get("values", 0):
            yield f"{option} takes {values} values"
        elif action.const is not None and action.const != (option in flag["options"]):
            yield f"{option} means {action.const}"
        elif action.dest != actions[flag["options"][-1]].dest:
            yield f"{option} is {action.dest}"


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_written_as_in_horovod(name):
    assert not list(flag_differences(FLAGS[name]))


def test_the_differences_of_a_flag_are_found():
    """The comparison itself."""
    assert list(flag_differences({"options": ["--none"]})) == ["--none is missing"]
    assert list(flag_differences({"options": ["--hosts"]})) == ["--hosts takes 1 values"]
    assert list(flag_differences({"options": ["--gloo", "--mpi"]})) == ["--gloo is gloo"]
    assert list(flag_differences({"options": ["--no-verbose", "--verbose"]})) == ["--no-verbose means False"]


def test_a_flag_is_in_its_group_of_the_help():
    parser = _parser()
    groups = {option: group.title for group in parser._action_groups for option in _options(group)}
    assert {name: groups[name] for name in FLAGS} == {name: GROUPS[flag["group"]] for name, flag in FLAGS.items()}


def _options(group):
    return [option for action in group._group_actions for option in action.option_strings]


def test_a_flag_has_its_variable_and_its_key():
    ours = {option: flag for flag in all_flags() for option in flag.options}
    for name, flag in FLAGS.items():
        if "variable" in flag:
            assert (name, ours[name].variable) == (name, flag["variable"])
        if "key" in flag:
            assert (name, ours[name].key) == (name, flag["key"])
    assert set(LEVELS) == set(FLAGS["--log-level"]["choices"])


def start_timeout():
    return resolve_start_timeout(None)


def elastic_timeout():
    return resolve_limits(2, ElasticArguments(least=1)).timeout


@pytest.mark.parametrize(
    ("name", "resolve"), [("--start-timeout", start_timeout), ("--elastic-timeout", elastic_timeout)]
)
def test_a_timeout_is_that_of_the_environment_or_the_default(monkeypatch, name, resolve):
    flag = FLAGS[name]
    monkeypatch.delenv(flag["fallback"], raising=False)
    assert resolve() == flag["default"]
    monkeypatch.setenv(flag["fallback"], "77")
    assert resolve() == 77


@pytest.mark.parametrize("options", TABLE["exclusive"])
def test_one_of_several_flags(capsys, options):
    for first, second in zip(options, options[1:] + options[:1], strict=True):
        with pytest.raises(SystemExit) as caught:
            main(["-np", "2", *first.split(), *second.split(), "true"])
        assert caught.value.code == 2
        assert re.search("give (only )?one", capsys.readouterr().err)


def ours(name):
    """The parameters of ours under the name of Horovod's, without self and cls."""
    if name == "run":
        return list(inspect.signature(importlib.import_module("hvd_cluster").run).parameters.values())
    pytest.importorskip("ray")
    kind, _, method = name.partition(".")
    called = getattr(importlib.import_module("hvd_cluster.ray"), kind)
    function = getattr(called, method) if method else called
    parameters = list(inspect.signature(function).parameters.values())
    return [parameter for parameter in parameters if parameter.name != "self"]


def signature_differences(theirs, parameters):
    """How ``parameters`` differ from ``theirs``, the defaults by name."""
    found = {parameter.name: parameter for parameter in parameters}
    both = [name for name in found if name in theirs]
    if both != [name for name in theirs if name in found] or both != list(found)[: len(both)]:
        yield f"the order is {', '.join(found)}"
    yield from (f"{name} is missing" for name in theirs if name not in found)
    yield from (f"{name} is added" for name in found if name not in theirs)
    for name in both:
        default = found[name].default
        if (default := "required" if default is inspect.Parameter.empty else default) != _plain(theirs[name]):
            yield f"{name} is {default!r}, not {theirs[name]!r}"
        if found[name].kind is inspect.Parameter.KEYWORD_ONLY:
            yield f"{name} is taken by keyword only"


def _plain(value):
    return tuple(value) if isinstance(value, list) else value


# Ray sets a variable when it is imported.
@pytest.mark.leaves("environment")
@pytest.mark.parametrize("name", TABLE["signatures"])
def test_a_signature_is_that_of_horovod(name):
    assert set(signature_differences(TABLE["signatures"][name], ours(name))) == DIFFERENCES.get(name, {}).keys()


def test_differences_are_found():
    """The comparison itself."""

    def function(a, c=2, *, b=(), d):
        """With all kinds of differences."""

    found = signature_differences(
        {"a": "required", "b": [], "c": 1, "e": None}, inspect.signature(function).parameters.values()
    )
    assert set(found) == {
        "the order is a, c, b, d",
        "b is taken by keyword only",
        "c is 2, not 1",
        "d is added",
        "e is missing",
    }
