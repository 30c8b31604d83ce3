"""Workers that were never started, because others took their room: no failure of them, nor of their host."""

from driven import elastic, published, report

from executors.driver.driver import Driver

REASON = "was withdrawn: no room"


def begun(job, agents, least):
    """Four workers on one host, two of which never come up."""

    def withdraws(worker):
        late = worker in ("worker-2", "worker-3")
        if late:
            agents.kill(worker)
            driver.limit_slots("a", 4 - len(agents.killed))
            driver.withdraw(worker, REASON)
        return late

    driver = Driver(elastic(4, least=least), job, agents, 30.0, lambda: agents.now, withdraws=withdraws)
    driver.found({"a": 4})
    for worker in ("worker-0", "worker-1"):
        driver.up(worker)
    agents.wait(30.0)
    return driver


def test_the_others_go_on_and_the_host_gets_workers_when_it_has_room_again(job, agents):
    driver = begun(job, agents, least=2)
    assert (agents.killed, list(agents.started)) == (["worker-2", "worker-3"], [f"worker-{n}" for n in range(4)])
    newest = published(job, 2)
    assert [worker for worker, _ in newest.workers] == ["worker-0", "worker-1"]
    assert newest.text == f"rank 2 on host a {REASON}, rank 3 on host a {REASON}"
    assert not driver.has_formed
    report(job, agents, "worker-0", 0, kind="formed", round=2, call=1)
    assert driver.has_formed
    driver.found({"a": 3})
    assert list(agents.started)[4:] == ["worker-4"]


def test_too_few_workers_wait_for_room(job, agents):
    driver = begun(job, agents, least=3)
    assert not driver.is_over
    assert len(agents.started) == 4
    driver.found({"a": 4})
    assert len(agents.started) == 6
