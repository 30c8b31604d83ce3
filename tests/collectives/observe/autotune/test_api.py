"""Autotuning as a user meets it: variables, the line at the end, the log, the picture."""

import re

import pytest

import hvd_cluster
from collectives.observe.autotune.journal import COLUMNS
from hvd_cluster.autotune import is_tuning, main
from tests.collectives.observe.autotune.test_search import needs_library

QUICK = {
    "HOROVOD_AUTOTUNE": "1",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "0",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "1",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "5",
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "2",
}
SEARCH_SECONDS = 60  # only a search that hangs needs them


def train():
    import time

    import numpy as np

    from hvd_cluster.core import basics
    from tests.collectives.engine.job import run

    basics.init()
    searched, deadline, goes_on = is_tuning(), time.monotonic() + SEARCH_SECONDS, 1.0
    while goes_on:
        run(basics.engine(), np.ones(100), "x")
        goes_on = run(basics.engine(), np.array([1.0 * (is_tuning() and time.monotonic() < deadline)]), "going")[0]
    parameters = basics.engine().parameters
    basics.shutdown()
    return searched, parameters.version, basics.is_tuning()


@needs_library
@pytest.mark.leaves("descriptors", "environment")  # matplotlib keeps fonts open
def test_a_job_tunes_itself_and_draws_the_search(tmp_path, capfd):
    log, picture = tmp_path / "search.csv", tmp_path / "search.png"
    ranks = hvd_cluster.run(train, num_proc=2, env={**QUICK, "HOROVOD_AUTOTUNE_LOG": str(log)})
    assert [searched for searched, _, _ in ranks] == [True, False]
    assert ranks[0][1] == ranks[1][1] > 5
    assert not ranks[0][2]
    shown = capfd.readouterr().err
    assert len(re.findall("autotuning is over: ", shown)) == 1
    assert "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE is '2', but must be a number from 0 to 1; 0.8 is used" in shown
    assert draw("plot", log) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def draw(*arguments):
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return end.value.code


def test_a_picture_of_a_file_that_is_no_log(tmp_path, capsys):
    for name, text, reason in (
        ("other.csv", "a,b\n1,2\n", "is not a log of autotuning"),
        ("empty.csv", "", "is not a log of autotuning"),
        ("none.csv", None, "No such file"),
        ("short.csv", f"{','.join(COLUMNS)}\n", "has no trials yet"),
        ("cut.csv", f"{','.join(COLUMNS)}\n1,1,0\n", "is not complete"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        assert draw("plot", tmp_path / name) == 1
        assert reason in capsys.readouterr().err


@pytest.mark.leaves("descriptors", "environment")
def test_the_picture_has_the_format_of_its_name(tmp_path):
    pytest.importorskip("matplotlib")
    log, picture = tmp_path / "log.csv", tmp_path / "picture.svg"
    row = "1,1,0,1,{},{},{},1,50,1048576,{}\n"
    rows = [row.format(1 + trial, 1 << 20 << trial, 10.0 * trial, int(trial == 3)) for trial in range(4)]
    log.write_text(",".join(COLUMNS) + "\n" + "".join(rows))
    assert draw("plot", log, "--output", picture) == 0
    text = picture.read_text()
    assert "<svg" in text
    assert draw("plot", log, "--output", tmp_path / "picture.nothing") == 1
