"""run() in the kernel of a real notebook: output while the ranks run, results, exceptions, and the interrupt."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests import startup

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[1]

DEFINITIONS = """
import os, pathlib, sys, time
import psutil
import hvd_cluster

answer = pathlib.Path({answer!r})

def rank():
    return int(os.environ["HOROVOD_RANK"])

def talk(factor):
    print("waiting", rank(), flush=True)
    print("aside", rank(), file=sys.stderr, flush=True)
    deadline = time.monotonic() + 80
    while not answer.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return factor * rank(), answer.exists()

def fail():
    if rank() == 1:
        raise KeyError("no such column")
    time.sleep(600)

def hang():
    print("hanging", rank(), flush=True)
    time.sleep(600)
"""
TALK = "hvd_cluster.run(talk, (10,), num_proc=2)"
FAIL = "hvd_cluster.run(fail, num_proc=2)"
HANG = "hvd_cluster.run(hang, num_proc=2)"
LEFT = "[child.name() for child in psutil.Process().children(recursive=True)]"
COLOUR = re.compile(r"\x1b\[[\d;]*m")


class Reader(nbclient.NotebookClient):
    """Reads as the user of the notebook does, and acts on what appears while a cell runs."""

    def __init__(self, notebook, answer):
        super().__init__(notebook, timeout=100, kernel_name="python3", allow_errors=True)
        self._answer = answer
        self._seen = ""

    def output(self, outs, msg, display_id, cell_index):
        self._seen += msg["content"].get("text", "")
        if "[0]<stdout>:waiting 0\n" in self._seen and "[1]<stdout>:waiting 1\n" in self._seen:
            self._answer.touch()
        if "[1]<stdout>:hanging 1\n" in self._seen:
            self._seen = ""
            # As the stop button does.
            os.killpg(os.getpgid(self.km.provisioner.pid), signal.SIGINT)
        return super().output(outs, msg, display_id, cell_index)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The outputs of each cell, of a notebook that ran."""
    folder = tmp_path_factory.mktemp("notebook")
    answer = folder / "answer"
    cells = [DEFINITIONS.format(answer=str(answer)), TALK, FAIL, HANG, LEFT]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
            patch.setenv(name, str(folder / name))
        patch.setenv("PYTHONPATH", startup.PATH)
        Reader(notebook, answer).execute(cwd=str(folder))
    return dict(zip([TALK, FAIL, HANG, LEFT], (cell.outputs for cell in notebook.cells[1:]), strict=True))


def result(outputs):
    [found] = [each.data["text/plain"] for each in outputs if each.output_type == "execute_result"]
    return found


def error(outputs):
    [found] = [each for each in outputs if each.output_type == "error"]
    return found.ename, COLOUR.sub("", "\n".join(found.traceback))


def test_results_come_by_rank_and_the_output_while_the_ranks_run(outputs):
    """The ranks wait for a reader of their output."""
    assert result(outputs[TALK]) == "[(0, True), (10, True)]"


def test_each_line_has_its_rank_and_its_stream(outputs):
    for stream, word in (("stdout", "waiting"), ("stderr", "aside")):
        text = "".join(each.text for each in outputs[TALK] if each.output_type == "stream" and each.name == stream)
        assert sorted(text.splitlines()) == [f"[{rank}]<{stream}>:{word} {rank}" for rank in range(2)]


def test_an_exception_of_a_rank_is_raised_as_itself_with_rank_and_traceback(outputs):
    name, text = error(outputs[FAIL])
    assert name == "KeyError"
    assert text.index("RemoteError: raised by rank 1 on localhost") < text.index("in fail")
    assert text.rstrip().endswith("KeyError: 'no such column'")


def test_an_interrupt_ends_the_ranks(outputs):
    name, _ = error(outputs[HANG])
    assert name == "KeyboardInterrupt"
    assert result(outputs[LEFT]) == "[]"
