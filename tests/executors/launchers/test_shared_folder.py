"""Ranks find one another by a file in a folder that all hosts share."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from collectives.api import CollectiveTimeoutError, SettingsError
from executors.launchers.bootstrap import join
from executors.launchers.place import Farewell, Place
from executors.launchers.shared_folder import FOLDER, SharedFolder
from executors.launchers.table import place_of

SECONDS = 60.0


def joined(folder, size, job="a job"):
    places = [Place("srun", "N", rank, size, job, SharedFolder(folder)) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda place: join(place, SECONDS, Farewell()), places))


def end(results):
    for each in results:
        each.close()


def test_ranks_find_one_another_and_leave_nothing(tmp_path):
    results = joined(tmp_path, 3)
    assert not list(tmp_path.iterdir())
    end(results)
    assert [each.environment["HOROVOD_RANK"] for each in results] == ["0", "1", "2"]
    assert len({each.environment["_HOROVOD_SECRET_KEY"] for each in results}) == 1


@pytest.mark.parametrize("damage", ["stopped", "short", "no offer", "open to others"])
def test_a_file_that_an_earlier_rank_0_left_is_passed_over(tmp_path, damage):
    led = SharedFolder(tmp_path).lead("a job", SECONDS)
    led.server.stop()
    [file] = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    if damage == "open to others":
        file.chmod(0o644)
    elif damage != "stopped":
        file.write_bytes(file.read_bytes()[:20] if damage == "short" else b"{}")
    end(joined(tmp_path, 2))


def test_a_file_of_another_user_is_passed_over(tmp_path, monkeypatch):
    led = SharedFolder(tmp_path).lead("a job", SECONDS)
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(CollectiveTimeoutError, match="not found within"):
        SharedFolder(tmp_path).follow("a job", 0.05)
    led.server.stop()
    led.end()


def test_a_later_rank_0_keeps_its_file(tmp_path):
    first, second = (SharedFolder(tmp_path).lead("a job", SECONDS) for _ in range(2))
    first.server.stop()
    first.end()
    found = SharedFolder(tmp_path).follow("a job", SECONDS)
    assert found.port == second.server.port
    second.server.stop()
    second.end()


def test_jobs_with_different_names_share_a_folder(tmp_path):
    first, second = (SharedFolder(tmp_path).lead(job, SECONDS) for job in ("one", "two"))
    ports = [SharedFolder(tmp_path).follow(job, SECONDS).port for job in ("one", "two")]
    assert ports == [first.server.port, second.server.port]
    for led in (first, second):
        led.server.stop()
        led.end()


def test_no_such_folder(tmp_path):
    with pytest.raises(SettingsError, match=r"HOROVOD_RENDEZVOUS_FOLDER is '.*/none', where rank 0 cannot write \("):
        SharedFolder(tmp_path / "none").lead("a job", SECONDS)


def test_no_rank_0(tmp_path):
    with pytest.raises(CollectiveTimeoutError, match=r"not found within 0\.05 s by its file .*hvd-cluster-\w+\.json"):
        SharedFolder(tmp_path).follow("a job", 0.05)


def test_the_folder_of_the_user_comes_before_what_the_launcher_offers():
    environment = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    assert place_of({**environment, FOLDER: "/shared/job"}).rendezvous == SharedFolder(Path("/shared/job"))
    assert not isinstance(place_of(environment).rendezvous, SharedFolder)


def test_the_folder_is_enough_where_a_launcher_says_rank_and_size():
    environment = {"RANK": "1", "WORLD_SIZE": "4"}
    assert place_of({**environment, FOLDER: "/shared/job"}).rendezvous == SharedFolder(Path("/shared/job"))
    assert place_of(environment).rendezvous is None


@pytest.mark.parametrize("variables", [{}, {"RANK": "1"}, {"WORLD_SIZE": "4"}])
def test_the_folder_is_not_enough_where_nobody_says_rank_and_size(variables):
    text = r"HOROVOD_RENDEZVOUS_FOLDER is '/shared/job', but no launcher .*: set RANK and WORLD_SIZE for each process"
    with pytest.raises(SettingsError, match=text):
        place_of({**variables, FOLDER: "/shared/job"})


@pytest.mark.parametrize("variables", [{"HOROVOD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_a_process_that_is_alone_on_purpose_needs_no_folder(variables):
    assert place_of({**variables, FOLDER: "/shared/job"}) is None
