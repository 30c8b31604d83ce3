"""Files and the pipe between a task of Spark and its worker."""

import gc
import os
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from executors.api import ExecutorError
from hvd_cluster.spark.rows.row_stream import ALIGNMENT, VARIABLE, Form, RowWriter, open_reader, open_writer

FORMS = [Form(np.dtype(np.float32), False), Form(np.dtype(np.int64), True)]
WIDTH = 3


@contextmanager
def row_stream(folder, monkeypatch, splits=1):
    with open_writer(str(folder), FORMS, splits) as writer:
        copies = [os.dup(descriptor) for descriptor in writer.descriptors]
        monkeypatch.setenv(VARIABLE, " ".join(str(copy) for copy in copies))
        with open_reader(FORMS, splits) as reader:
            monkeypatch.delenv(VARIABLE)
            yield writer, reader


def rows(first, stop):
    ids = np.arange(first, stop)
    return [np.repeat(ids.astype(np.float32)[:, None], WIDTH, axis=1), ids]


def mappings():
    """The mapped files without a name."""
    return sum("(deleted)" in line for line in Path("/proc/self/maps").read_text().splitlines())


def check(arrays, ids):
    features, labels = arrays
    np.testing.assert_array_equal(labels, ids)
    np.testing.assert_array_equal(features, np.repeat(np.float32(ids)[:, None], WIDTH, axis=1))


def test_any_range_of_rows_is_there_once_it_was_announced(tmp_path, monkeypatch):
    with row_stream(tmp_path, monkeypatch) as (writer, reader):
        for first in range(0, 9000, 1000):
            writer.append(0, rows(first, first + 1000))
            writer.announce()
            assert reader.wait(0, first + 1) == first + 1000
        assert reader.row_bytes() == 4 * WIDTH + 8
        for first, stop in [(0, 9000), (0, 1), (8999, 9000), (1, 5000), (4321, 4400)]:
            check(reader.view(0, first, stop), np.arange(first, stop))
        writer.finish()
        assert reader.wait(0) == reader.wait(0, 10_000) == 9000


def test_rows_can_be_taken_in_any_order(tmp_path, monkeypatch):
    order = np.random.default_rng(0).permutation(500) + 100
    with row_stream(tmp_path, monkeypatch) as (writer, reader):
        writer.append(0, rows(0, 1000))
        writer.finish()
        assert reader.wait(0) == 1000
        arrays = reader.take(0, order)
        check(arrays, order)
        assert all(array.flags.writeable and array.ctypes.data % ALIGNMENT == 0 for array in arrays)


def test_parts_are_apart(tmp_path, monkeypatch):
    with row_stream(tmp_path, monkeypatch, splits=2) as (writer, reader):
        writer.append(0, rows(0, 10))
        writer.append(1, rows(10, 13))
        writer.finish()
        assert (reader.wait(0), reader.wait(1)) == (10, 3)
        check(reader.view(1, 0, 3), [10, 11, 12])


def test_what_is_written_to_a_view_stays_there(tmp_path, monkeypatch):
    with row_stream(tmp_path, monkeypatch) as (writer, reader):
        writer.append(0, rows(0, 100))
        writer.finish()
        assert reader.wait(0) == 100
        first = reader.view(0, 0, 100)
        first[0] += 1
        first[1][:] = 0
        check(reader.view(0, 0, 100), np.arange(100))


def test_a_mapping_ends_with_its_last_view(tmp_path, monkeypatch):
    with row_stream(tmp_path, monkeypatch) as (writer, reader):
        writer.append(0, rows(0, 100))
        writer.finish()
        assert reader.wait(0) == 100
        gc.collect()  # of what tests before this one have mapped
        before = mappings()
        part = [array[5:6] for array in reader.view(0, 0, 100)]
        assert mappings() == before + 2
        check(part, [5])
        del part
        gc.collect()
        assert mappings() == before


def test_the_files_have_no_name(tmp_path, monkeypatch):
    with row_stream(tmp_path, monkeypatch) as (writer, _):
        writer.append(0, rows(0, 100))
        assert not list(tmp_path.iterdir())


def test_a_task_never_waits_for_a_worker_that_does_not_read(tmp_path, monkeypatch):
    with row_stream(tmp_path, monkeypatch) as (writer, reader):
        for first in range(5000):  # many times what a pipe takes
            writer.append(0, rows(first, first + 1))
            writer.announce()
        assert reader.wait(0, 1) == 5000
        writer.finish()
        assert reader.wait(0) == 5000


def test_a_record_that_is_not_whole_is_not_read(tmp_path, monkeypatch):
    """As when a reader looks while the task writes."""
    with row_stream(tmp_path, monkeypatch) as (writer, reader):
        writer.append(0, rows(0, 10))
        writer.announce()
        whole = os.fstat(writer.descriptors[1]).st_size
        writer.append(0, rows(10, 20))
        writer.announce()
        os.truncate(writer.descriptors[1], whole * 2 - 1)
        assert reader.wait(0, 1) == 10
        check(reader.view(0, 0, 10), np.arange(10))


def test_no_rows(tmp_path, monkeypatch):
    with row_stream(tmp_path, monkeypatch) as (writer, reader):
        writer.finish()
        assert reader.wait(0) == reader.wait(0, 1) == 0


def test_the_end_of_the_task_ends_the_wait(tmp_path, monkeypatch):
    with open_writer(str(tmp_path), FORMS, 1) as writer:
        copies = [os.dup(descriptor) for descriptor in writer.descriptors]
        writer.append(0, rows(0, 10))
        writer.announce()
    monkeypatch.setenv(VARIABLE, " ".join(str(copy) for copy in copies))
    with open_reader(FORMS, 1) as reader:
        assert reader.wait(0, 10) == 10
        for _ in range(2):
            with pytest.raises(ExecutorError, match="ended before the last row"):
                reader.wait(0, 11)
        check(reader.view(0, 0, 10), np.arange(10))


def test_descriptors_are_not_passed_on(tmp_path, monkeypatch):
    with open_writer(str(tmp_path), FORMS, 1) as writer:
        copies = [os.dup(descriptor) for descriptor in writer.descriptors]
        for copy in copies:
            os.set_inheritable(copy, True)
        monkeypatch.setenv(VARIABLE, " ".join(str(copy) for copy in copies))
        with open_reader(FORMS, 1):
            assert not any(os.get_inheritable(copy) for copy in copies)


def test_a_full_disk(tmp_path):
    text = rf"do not fit {tmp_path}, which has \d+ MiB left; set spark.local.dir to a folder with more space"
    with open(os.devnull, "rb") as end, open(os.devnull, "wb", buffering=0) as log, open("/dev/full", "wb", 0) as full:
        writer = RowWriter(str(tmp_path), end, log, [[full, full]], FORMS)
        with pytest.raises(ExecutorError, match=text):
            writer.append(0, rows(0, 10))


def test_a_process_without_rows(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ExecutorError, match="only a worker of run_on_dataframe has rows"), open_reader(FORMS, 1):
        pass
