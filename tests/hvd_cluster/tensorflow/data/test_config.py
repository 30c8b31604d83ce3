"""The configuration of a data service, and its file."""

import dataclasses
import os
import stat
import threading

import pytest

from executors.api import StartTimeoutError
from hvd_cluster.tensorflow.data.config import TfDataServiceConfig

CONFIG = TfDataServiceConfig(2, 3, "compute", {"eth0": [("10.0.0.1", 1234)], "lo": [("127.0.0.1", 5)]}, b"\x00secret")


def test_a_file_has_all_of_it(tmp_path):
    path = tmp_path / "service.json"
    CONFIG.write(path)
    assert TfDataServiceConfig.read(path) == CONFIG
    assert TfDataServiceConfig.from_dict(CONFIG.to_dict()) == CONFIG
    assert CONFIG.timeout == 60


def test_only_the_owner_reads_the_key(tmp_path):
    path = tmp_path / "service.json"
    path.touch(mode=0o644)
    CONFIG.write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "secret" not in repr(CONFIG)
    assert os.listdir(tmp_path) == ["service.json"]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "service.json").mkdir()
    with pytest.raises(IsADirectoryError):
        CONFIG.write(tmp_path / "service.json")
    assert os.listdir(tmp_path) == ["service.json"]


def test_waiting_for_a_file(tmp_path):
    path = tmp_path / "service.json"
    found = []
    reader = threading.Thread(target=lambda: found.append(TfDataServiceConfig.read(path, True)))
    reader.start()
    CONFIG.write(path)
    reader.join(60)
    assert found == [CONFIG]


def test_a_file_that_does_not_come(tmp_path):
    with pytest.raises(FileNotFoundError):
        TfDataServiceConfig.read(tmp_path / "service.json")
    with pytest.raises(StartTimeoutError, match=r"service\.json was not created within 0\.1 s; check that the compute"):
        TfDataServiceConfig.read(tmp_path / "service.json", wait_for_file_creation=True, timeout=0.1)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": 3, "addresses": {}}', "\x00"])
def test_a_file_of_something_else(tmp_path, text):
    (tmp_path / "service.json").write_text(text)
    with pytest.raises(ValueError, match=r"service\.json is not the configuration of a data service"):
        TfDataServiceConfig.read(tmp_path / "service.json")


@pytest.mark.parametrize(
    "change",
    [{"dispatchers": 0}, {"workers_per_dispatcher": 1.5}, {"dispatcher_side": "both"}, {"timeout": 0}],
)
def test_values_that_are_not_allowed(change):
    (name,) = change
    with pytest.raises(ValueError, match=f"^{name}="):
        dataclasses.replace(CONFIG, **change)
