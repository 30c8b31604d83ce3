"""The flags of hvdrun, its configuration file, and what the ranks get of both."""

import re
from pathlib import Path

import pytest

from executors.agents.hosts.arguments import Places
from hvd_cluster import __version__
from hvd_cluster.cli.check_build import build_summary
from hvd_cluster.cli.command_line import read_command_line
from hvd_cluster.cli.config_file import read_config
from hvd_cluster.cli.flags import GROUPS, all_flags, variables
from hvd_cluster.cli.hvdrun import _dashboard, _place_arguments, main
from hvd_cluster.diagnose.trial import BackendTrial

# As in Horovod's documentation; the options of each with a value, the variable and its value.
OPTIONS = [
    ("--fusion-threshold-mb 32", "HOROVOD_FUSION_THRESHOLD", "33554432"),
    ("--cycle-time-ms 2.5", "HOROVOD_CYCLE_TIME", "2.5"),
    ("--cache-capacity 0", "HOROVOD_CACHE_CAPACITY", "0"),
    ("--hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE", "1"),
    ("--no-hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE", "0"),
    ("--no-hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER", "0"),
    ("--torus-allreduce", "HOROVOD_TORUS_ALLREDUCE", "1"),
    ("--autotune", "HOROVOD_AUTOTUNE", "1"),
    ("--no-autotune", "HOROVOD_AUTOTUNE", "0"),
    ("--autotune-log-file log", "HOROVOD_AUTOTUNE_LOG", "log"),
    ("--autotune-warmup-samples 1", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "1"),
    ("--autotune-steps-per-sample 2", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "2"),
    ("--autotune-bayes-opt-max-samples 3", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "3"),
    ("--autotune-gaussian-process-noise 0.5", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "0.5"),
    ("--timeline-filename file", "HOROVOD_TIMELINE", "file"),
    ("--timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", "1"),
    ("--stall-check", "HOROVOD_STALL_CHECK_DISABLE", "0"),
    ("--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", "1"),
    ("--stall-check-warning-time-seconds 7", "HOROVOD_STALL_CHECK_TIME_SECONDS", "7"),
    ("--stall-check-shutdown-time-seconds 0", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0"),
    ("--mpi-threads-disable", "HOROVOD_MPI_THREADS_DISABLE", "1"),
    ("--tcp", "NCCL_IB_DISABLE", "1"),
    ("--num-nccl-streams 2", "HOROVOD_NUM_NCCL_STREAMS", "2"),
    ("--thread-affinity 0,1", "HOROVOD_THREAD_AFFINITY", "0,1"),
    ("--gloo-timeout-seconds 9", "HOROVOD_GLOO_TIMEOUT_SECONDS", "9"),
    ("--log-level debug", "HOROVOD_LOG_LEVEL", "DEBUG"),
    ("--log-with-timestamp", "HOROVOD_LOG_HIDE_TIME", "0"),
    ("--log-without-timestamp", "HOROVOD_LOG_HIDE_TIME", "1"),
    ("--log-hide-timestamp", "HOROVOD_LOG_HIDE_TIME", "1"),
    ("--no-log-hide-timestamp", "HOROVOD_LOG_HIDE_TIME", "0"),
]


@pytest.mark.parametrize(("options", "variable", "value"), OPTIONS)
def test_an_option_is_a_variable_of_the_ranks(options, variable, value):
    line = read_command_line(["-np", "2", *options.split(), "true"])
    assert variables(line.values) == {variable: value}


def test_all_variables_are_tried():
    assert {flag.variable for flag in all_flags() if flag.variable} == {variable for _, variable, _ in OPTIONS}


def test_an_option_has_precedence_over_the_environment(capfd, monkeypatch):
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
    monkeypatch.setenv("HOROVOD_CACHE_CAPACITY", "7")
    script = "echo $HOROVOD_CYCLE_TIME $HOROVOD_CACHE_CAPACITY"
    assert main(["-np", "1", "--cycle-time-ms", "3", "sh", "-c", script]) == 0
    assert capfd.readouterr().out == "[0]<stdout>:3 7\n"


def test_network_interfaces_are_for_both_libraries(capfd):
    script = "echo $HOROVOD_GLOO_IFACE $NCCL_SOCKET_IFNAME"
    assert main(["-np", "1", "--network-interface", "lo,eth0", "sh", "-c", script]) == 0
    assert capfd.readouterr().out == "[0]<stdout>:lo lo,eth0\n"


def test_names_and_keys_are_unique():
    flags = list(all_flags())
    options = [option for flag in flags for option in (*flag.options, *flag.negatives)]
    assert len(set(options)) == len(options)
    assert len({flag.name for flag in flags}) == len({flag.key for flag in flags}) == len(flags)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            "-H a",
            "argument -H/--hosts: 'a' must be hosts with their slots, such as node1:4,node2:4; 'a' is not host:slots",
        ),
        ("-H localhost:1", "2 processes need 2 slots, but the hosts have 1 (localhost:1)"),
        ("-H a:2 --hostfile x", "-H and --hostfile both say which hosts there are; give one"),
        ("--hostfile /nope", "the host file '/nope' cannot be read ("),
        ("--hostfile {}", "the host file '{}': 'a b' is not a line such as node1 slots=4"),
        ("-H a:2 --slots 2", "--slots-per-host is for the hosts of a --host-discovery-script, which is missing"),
        (
            "--remote-shell ssh",
            "--remote-shell is for other hosts; give one of -H, --hostfile, ",
        ),
        ("-H a:2 -p 0", "argument -p/--ssh-port: '0' must be a port number, 1 to 65535"),
        ("--autotune-steps-per-sample 0", "argument --autotune-steps-per-sample: '0' must be an integer of at least 1"),
        (
            "-H a:2 -p 22 --remote-shell ssh",
            "-p is for ssh, but --remote-shell is another command; leave one of them out",
        ),
    ],
)
def test_places_that_are_not_possible(tmp_path, capsys, options, problem):
    path = tmp_path / "hosts"
    path.write_text("a b")
    with pytest.raises(SystemExit) as caught:
        main(["-np", "2", *options.format(path).split(), "true"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"hvdrun: {problem.format(path)}")


def places(*options, elastic=False):
    given = _place_arguments(read_command_line(["-np", "2", *options, "true"]))
    return Places.of(given, 2, elastic)


@pytest.mark.parametrize("option", ["-i", "-I", "--ssh-identity-file"])
def test_other_hosts_are_reached_by_ssh(option):
    found = places("-H", "a:4", "-p", "2222", option, "a key")
    assert found.hosts == {"a": 2}
    options = "-o BatchMode=yes -o StrictHostKeyChecking=no -o ConnectTimeout=10 -p 2222 -i"
    assert found.shell.command("a") == ["ssh", *options.split(), "a key", "a", "sh"]


def test_this_host_needs_no_shell():
    found = places("-H", "localhost:4")
    assert (found.hosts, found.shell) == ({"localhost": 2}, None)


def test_the_hosts_of_an_elastic_job_keep_all_slots():
    found = places("--min-np", "1", "-H", "a:4,b:4", elastic=True)
    assert found.discovery.find_available_hosts_and_slots() == {"a": 4, "b": 4}
    assert found.hosts is None
    assert found.shell is not None


def test_the_help_has_all_options_and_groups(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"\n{group}:" in text for group in GROUPS if group)
    words = set(re.findall(r"(?<!\S)-[\w-]+", text))
    assert not [option for flag in all_flags() for option in (*flag.options, *flag.negatives) if option not in words]


def config(folder, text):
    path = folder / "config.yaml"
    path.write_text(text)
    return path


EXAMPLE = """
controller: gloo
num_proc: 2
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 5
  hierarchical_allreduce: true
  cache_capacity:
autotune: {enabled: false, gaussian_process_noise: 0.5}
elastic:
  min_np: 1
  blacklist_cooldown_range: [1, 60]
stall_check: {enabled: off}
logging: {level: info, with_timestamp: no}
"""


def test_the_configuration_file(tmp_path):
    assert read_config(config(tmp_path, EXAMPLE)) == {
        "gloo": True,
        "num_proc": 2,
        "fusion_threshold_mb": 32,
        "cycle_time_ms": 5.0,
        "hierarchical_allreduce": True,
        "autotune": False,
        "autotune_gaussian_process_noise": 0.5,
        "min_np": 1,
        "blacklist_cooldown_range": [1.0, 60.0],
        "stall_check": False,
        "log_level": "INFO",
        "log_with_timestamp": False,
    }


def test_the_example_of_the_page(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "hvdrun.md").read_text()
    values = read_config(config(tmp_path, page.partition("```yaml\n")[2].partition("```")[0]))
    assert len(values) == 17
    assert values["network_interfaces"] == ("eth0", "eth1")
    assert values["hosts"] == {"node1": 4, "node2": 4}


def test_each_option_has_a_key(tmp_path):
    for flag in all_flags():
        head, _, tail = flag.key.partition(".")
        single = {"log_level": "INFO", "hosts": "a:1", "dashboard_address": "h:1"}.get(flag.name, 1)
        value = {0: "true", 2: "[1, 2]"}.get(flag.words, single)
        text = f"{head}: {{{tail}: {value}}}" if tail else f"{head}: {value}"
        assert list(read_config(config(tmp_path, text))) == [flag.name]


@pytest.mark.parametrize(
    "text", ["", "params:", "params: {}", "params:\n  # cycle_time_ms: 1", "controller:", "verbose:"]
)
def test_a_file_without_any_value(tmp_path, text):
    assert read_config(config(tmp_path, text)) == {}


def test_a_list_is_a_value_with_commas(tmp_path):
    text = "network_interfaces: [eth0, eth1]\nlibrary_options: {thread_affinity: [0, 1]}\nhosts: {list: [a:1, b:2]}"
    found = {"network_interfaces": ("eth0", "eth1"), "thread_affinity": "0,1", "hosts": {"a": 1, "b": 2}}
    assert read_config(config(tmp_path, text)) == found


def test_a_file_has_precedence_over_the_environment(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
    path = config(tmp_path, "num_proc: 1\nparams: {cycle_time_ms: 9}\nverbose: true")
    assert main(["--config-file", str(path), "--no-verbose", "sh", "-c", "echo $HOROVOD_CYCLE_TIME"]) == 0
    assert capfd.readouterr() == ("[0]<stdout>:9\n", "")


@pytest.mark.parametrize(
    "order", [["--config-file", "{}", "--cycle-time-ms", "1"], ["--cycle-time-ms", "1", "--config-file", "{}"]]
)
def test_the_command_line_has_precedence_over_the_file(tmp_path, order):
    path = config(tmp_path, "num_proc: 2\nparams: {cycle_time_ms: 9, cache_capacity: 3}")
    line = read_command_line([word.format(path) for word in order] + ["python", "train.py"])
    assert line.command == ["python", "train.py"]
    assert line.values == {"num_proc": 2, "cycle_time_ms": 1.0, "cache_capacity": 3}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("params: {cycle_time: 1}", "there is no key params.cycle_time; did you mean params.cycle_time_ms?"),
        ("x: 1", "there is no key x; the keys are autotune.bayes_opt_max_samples, autotune.enabled, "),
        ("num_proc: two", "num_proc is 'two', but must be an integer of at least 1"),
        ("num_proc: [1, 2]", "num_proc is [1, 2], but must be an integer of at least 1"),
        ("params: 3", "params is 3, but must have keys, such as params.fusion_threshold_mb"),
        ("other: {}", "there is no key other; "),
        ("other: {a: 1}", "there is no key other; "),
        ("elastic: {blacklist_cooldown_range: 1}", "elastic.blacklist_cooldown_range is 1, but must be 2 values"),
        ("autotune: {enabled: 3}", "autotune.enabled is 3, but must be true or false"),
        ("controller: ddl", "controller is 'ddl', but must be one of: gloo, mpi, jsrun"),
        ("controller: [mpi]", "controller is ['mpi'], but must be one of: gloo, mpi, jsrun"),
        ("- 1", "a configuration file has keys and values, such as num_proc: 2"),
    ],
)
def test_a_file_with_a_mistake(tmp_path, capsys, text, problem):
    path = config(tmp_path, text)
    with pytest.raises(SystemExit) as caught:
        main(["-np", "2", "--config-file", str(path), "true"])
    assert caught.value.code == 2
    assert f"hvdrun: {path}: {problem}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "options", "controller"),
    [
        ("", [], "gloo"),
        ("controller: mpi", [], "mpi"),
        ("controller: jsrun", ["--mpi"], "mpi"),
        ("controller: mpi", ["--gloo"], "gloo"),
        ("mpi: false", [], "gloo"),
        ("mpi: true", [], "mpi"),
    ],
)
def test_the_controller(tmp_path, text, options, controller):
    line = read_command_line(["-np", "2", "--config-file", str(config(tmp_path, text)), *options, "true"])
    assert line.controller == controller


def test_one_controller_in_a_file(tmp_path, capsys):
    path = config(tmp_path, "controller: mpi\njsrun: true")
    with pytest.raises(SystemExit):
        read_command_line(["-np", "2", "--config-file", str(path), "true"])
    text = "--mpi and --jsrun contradict each other: give only one of them"
    assert capsys.readouterr().err == f"hvdrun: {text}\n"


def test_words_for_another_launcher():
    line = read_command_line(["-np", "2", "--mpi-args=-v -x 'a b'", "--binding-args", "--map-by core", "true"])
    assert (line["mpi_args"], line["binding_args"]) == (("-v", "-x", "a b"), ("--map-by", "core"))


@pytest.mark.parametrize("text", [None, "a: [", b"\xff", "[" * 5000], ids=["none", "open", "no text", "deep"])
def test_a_file_that_cannot_be_read(tmp_path, text):
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"config.yaml: the configuration file cannot be read \(.*\)$") as caught:
        read_config(path)
    assert "\n" not in str(caught.value)


def refused(row):
    return BackendTrial(*row, seconds=None, reason=f"no {row.name} for {row.device}")


@pytest.mark.parametrize("option", ["-cb", "--check-build"])
def test_what_is_built(capsys, option):
    with pytest.raises(SystemExit) as caught:
        main([option])
    assert caught.value.code == 0
    assert capsys.readouterr().out == build_summary()


FRAMEWORKS = {"torch": "    [X] PyTorch", "tensorflow": "    [X] TensorFlow", "mxnet": "    [X] MXNet"}


@pytest.mark.parametrize("installed", [[], ["torch"], ["torch", "tensorflow", "mxnet"]])
def test_the_summary_is_true(monkeypatch, installed):
    monkeypatch.setattr("hvd_cluster.cli.check_build.find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr("hvd_cluster.cli.check_build.features.mpi_built", lambda: False)
    monkeypatch.setattr("hvd_cluster.cli.check_build.features.gloo_built", lambda: "torch" in installed)
    lines = build_summary(refused).splitlines()
    assert lines[:2] == [f"Horovod v{__version__}:", ""]
    there = [line for line in lines if "[X]" in line]
    assert sorted(there[:-1] if installed else there) == sorted([*map(FRAMEWORKS.get, installed), "    [X] Gloo"])
    assert [line for line in lines if line.startswith("Available")] == [
        "Available Frameworks:",
        "Available Controllers:",
        "Available Tensor Operations:",
    ]


def test_the_summary_says_why_something_is_not_there(monkeypatch):
    monkeypatch.setattr("hvd_cluster.cli.check_build.find_spec", lambda name: None)
    for name in ("mpi", "gloo", "nccl"):
        monkeypatch.setattr(f"hvd_cluster.cli.check_build.features.{name}_built", lambda: False)
    lines = build_summary(refused).splitlines()
    reasons = lines[lines.index("Why not the others:") + 1 :]
    assert reasons[:3] == [
        "    TensorFlow: it is not installed; install it with: pip install 'hvd-cluster[tensorflow]'",
        "    PyTorch: it is not installed; install it with: pip install 'hvd-cluster[torch]'",
        "    MXNet: it is not installed; install it with: python -m hvd_cluster.install_mxnet",
    ]
    names = [line.split(":")[0].strip() for line in reasons if line]
    assert names == ["TensorFlow", "PyTorch", "MXNet", "MPI", "NCCL", "DDL", "CCL", "Gloo"]
    for row, name in (("mpi", "MPI"), ("gloo", "Gloo")):
        assert f"    {name}: no {row} for cpu" in reasons
    assert "    NCCL: no nccl for cuda" in reasons


def test_a_library_that_works_under_its_launcher_is_there(monkeypatch):
    """mpirun may know where its MPI is, and hvdrun itself not."""
    for name in ("mpi", "nccl"):
        monkeypatch.setattr(f"hvd_cluster.cli.check_build.features.{name}_built", lambda: False)
    lines = build_summary(lambda row: BackendTrial(*row, 0.001, "") if row.name == "mpi" else refused(row)).splitlines()
    assert lines.count("    [X] MPI") == 2
    assert not [line for line in lines if line.startswith("    MPI:")]


def test_nothing_that_is_there_is_tried(monkeypatch):
    for name in ("mpi", "gloo", "nccl"):
        monkeypatch.setattr(f"hvd_cluster.cli.check_build.features.{name}_built", lambda: True)
    assert "    DDL: hvd-cluster does not use IBM's DDL" in build_summary(pytest.fail)


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ("", None),
        ("--dashboard", "127.0.0.1:0"),
        ("--dashboard-address 0.0.0.0:8265", "0.0.0.0:8265"),
        ("--dashboard --dashboard-address [::1]:80", "[::1]:80"),
        ("--no-dashboard --dashboard-address h:80", None),
    ],
)
def test_where_the_live_page_is(options, address):
    found = _dashboard(read_command_line(["-np", "2", *options.split(), "true"]))
    assert (None if found is None else str(found)) == address
