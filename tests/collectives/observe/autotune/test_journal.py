"""The log of a search."""

import csv
import errno
import logging
import os
from pathlib import Path

import pytest

from collectives.api import Parameters
from collectives.observe.autotune.journal import COLUMNS, Journal
from tests.collectives.backends.members import in_threads


def test_a_row_for_each_trial_at_once(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("old")
    journal = Journal(str(path))
    assert path.read_text() == ",".join(COLUMNS) + "\n"
    journal.add(Parameters(cycle_time=0.0125, patient=True, cache_capacity=0), 12.3456789)
    journal.close()
    (row,) = csv.DictReader(path.read_text().splitlines())
    assert row["hierarchical_allreduce"] == "1"
    assert (row["cycle_time_ms"], row["cache_enabled"], row["torus_allreduce"]) == ("12.5", "0", "0")
    assert (row["tensor_fusion_threshold"], row["score"]) == (str(128 << 20), "12.3457")
    assert (row["patient"], row["patience_ms"], row["pipeline_piece"]) == ("1", "50", str(1 << 20))


@pytest.mark.parametrize("path", ["/no/such/folder/log.csv", "/dev/full", "a\0b"])
def test_a_file_that_cannot_be_written_is_one_line(path, caplog):
    with caplog.at_level(logging.WARNING):
        journal = Journal(path)
        journal.add(Parameters(), 1.0)
        journal.add(Parameters(), 1.0)
    (record,) = caplog.records
    assert repr(path) in record.getMessage()
    assert "HOROVOD_AUTOTUNE_LOG" in record.getMessage()


def test_a_pipe_that_nobody_reads_does_not_hold_up_the_job(tmp_path, caplog):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    in_threads(1, lambda _: Journal(str(path)), 10)
    assert "the log of autotuning cannot be written" in caplog.text


def test_a_disk_that_is_full_leaves_the_rows_before(tmp_path, monkeypatch, caplog):
    path = tmp_path / "log.csv"
    journal = Journal(str(path))
    journal.add(Parameters(), 1.0)
    before = path.read_text()
    write = os.write

    def fail(file, data):
        if len(data) < 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[:-5])

    monkeypatch.setattr(os, "write", fail)
    journal.add(Parameters(), 2.0)
    assert path.read_text() == before
    assert "No space left on device" in caplog.text


def test_a_file_that_goes_on_where_there_is_none_has_its_first_line(tmp_path):
    path = tmp_path / "log.csv"
    journal = Journal(str(path), goes_on=True)
    journal.add(Parameters(), 1.0)
    journal.close()
    assert path.read_text().startswith(",".join(COLUMNS) + "\n")


def test_a_lost_rank_0_may_hold_the_file_until_the_first_row(tmp_path, caplog):
    path = str(tmp_path / "log.csv")
    lost = Journal(path)
    journal = Journal(path, goes_on=True)
    lost.close()
    journal.add(Parameters(), 7.0)
    journal.close()
    assert "7" in Path(path).read_text()
    assert not caplog.records


def test_a_closed_log_is_free_although_a_child_has_a_copy(tmp_path, caplog):
    path = str(tmp_path / "log.csv")
    journal = Journal(path)
    copy = os.dup(journal._file.descriptor)
    journal.close()
    Journal(path).close()
    os.close(copy)
    assert not caplog.records


def test_two_jobs_do_not_write_to_one_file(tmp_path, caplog):
    path = tmp_path / "log.csv"
    first = Journal(str(path))
    with caplog.at_level(logging.WARNING):
        second = Journal(str(path))
    assert "another job writes to it" in caplog.text
    first.add(Parameters(), 1.0)
    second.add(Parameters(), 2.0)
    assert len(path.read_text().splitlines()) == 2
    first.close()
    again = Journal(str(path), goes_on=True)
    again.add(Parameters(), 3.0, is_choice=True)
    again.close()
    assert [row["choice"] for row in csv.DictReader(path.read_text().splitlines())] == ["0", "1"]


def test_no_path_no_file(caplog):
    Journal("").add(Parameters(), 1.0)
    assert not caplog.records
