"""The writer in the background, and the arguments of a save."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from collectives.api import InvalidRequestError
from hvd_cluster.storage import checkpoints
from hvd_cluster.storage.checkpoints import Writer, noted
from hvd_cluster.storage.folders import CheckpointError
from hvd_cluster.storage.series import Note


def test_the_writer_works_in_a_thread_that_ends():
    writer, found = Writer(), []
    writer.start(lambda: found.append(threading.current_thread()))
    writer.wait(60)
    assert [(each.name, each.daemon, each.is_alive()) for each in found] == [("hvd-checkpoint", True, False)]
    writer.wait(0)


def test_an_error_is_raised_once_by_the_next_call(caplog):
    writer = Writer()
    writer.start(Path("/missing/file").read_bytes)
    with pytest.raises(FileNotFoundError):
        writer.wait(60)
    assert "a checkpoint was not written: FileNotFoundError" in caplog.text
    writer.wait(60)


def test_a_write_that_does_not_end():
    writer, end = Writer(), threading.Event()
    writer.start(lambda: end.wait(60))
    try:
        with pytest.raises(CheckpointError, match="still being written after 0 s: look whether its storage answers"):
            writer.wait(0)
    finally:
        end.set()
    writer.wait(60)


SCRIPT = """
import sys, threading
from functools import partial
from hvd_cluster.core import basics
from hvd_cluster.storage import checkpoints
basics.init()
ends = threading.Event()
add = checkpoints.Series.add
checkpoints.Series.add = lambda *arguments: ends.wait(60) and add(*arguments)
note = partial(checkpoints.noted, 1, None, None, "min")
options = dict(note=note, keep=1, background=True, timeout=60, storage_options=None)
checkpoints.save(sys.argv[1], lambda: b"data", "test", "bin", **options)
threading.Thread(target=lambda: threading.main_thread().join() or ends.set()).start()
"""


def test_the_end_of_a_script_waits_for_the_write(tmp_path):
    """It begins only when the main thread has ended."""
    subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], check=True, timeout=100)
    assert sorted(os.listdir(tmp_path)) == ["0000001-step-1.bin", "0000001-step-1.json"]


def test_a_write_that_the_end_of_a_script_does_not_wait_for(monkeypatch, caplog):
    monkeypatch.setattr(checkpoints, "TIMEOUT", 0)
    writer, end = Writer(), threading.Event()
    writer.start(lambda: end.wait(60))
    writer.end()
    end.set()
    writer.wait(60)
    assert "the script ends without its last checkpoint: the checkpoint before is still being written" in caplog.text


def test_arguments_of_a_note():
    assert noted(np.int64(3), 2, np.float32(0.5), "max", [1]) == Note(3, 2, 0.5, "max", [1])
    with pytest.raises(InvalidRequestError, match="mode='up' must be 'min' if a smaller metric is better, or 'max'"):
        noted(1, None, None, "up")
    with pytest.raises(InvalidRequestError, match=r"extra=\{1\} must be data that JSON can have"):
        noted(1, None, None, "min", {1})


@pytest.mark.parametrize(
    ("step", "epoch", "metric"), [(-1, None, None), (1.5, None, None), (1, "a", None), (1, 1, "a")]
)
def test_arguments_that_are_no_numbers(step, epoch, metric):
    with pytest.raises(InvalidRequestError, match="must be an integer of at least 0, an integer and a number"):
        noted(step, epoch, metric, "min")
