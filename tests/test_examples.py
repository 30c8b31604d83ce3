"""The examples run, shortened. ``make demo`` runs the one for Ray."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests import startup

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
DIGITS = str(EXAMPLES / "digits.py")
HVDRUN = sys.executable, "-m", "hvd_cluster"
AGREE = r"parameters: bit for bit the same on 2 of 2 ranks, sha256 [0-9a-f]{16}"


@pytest.mark.parametrize(
    ("launcher", "size", "prefix"),
    [((), 1, ""), ((*HVDRUN, "-np", "2"), 2, "[0]<stdout>:")],
    ids=["alone", "hvdrun"],
)
def test_digits(launcher: tuple[str, ...], size: int, prefix: str) -> None:
    epoch, verdict = _lines(*launcher, sys.executable, DIGITS, "--epochs", "1")
    assert re.fullmatch(
        rf"{re.escape(prefix)}epoch  1   loss \d\.\d{{4}}   held-out accuracy [01]\.\d{{4}}   [\d,]+ images/s", epoch
    )
    assert re.fullmatch(
        rf"{re.escape(prefix)}parameters: bit for bit the same on {size} of {size} ranks, sha256 [0-9a-f]{{16}}",
        verdict,
    )


def test_digits_says_that_a_batch_is_too_large() -> None:
    run = _run(sys.executable, DIGITS, "--batch-size", "2000")
    assert run.returncode != 0
    assert "1437 images are fewer than one step takes: 1 ranks x batches of 2000" in run.stderr


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("digits_uneven.py", r"epoch  1   batches by rank \[15, 30\]   held-out accuracy [01]\.\d{4}"),
        ("digits_amp.py", r"epoch  1   loss \d\.\d{4}   held-out accuracy [01]\.\d{4}"),
        ("lightning_digits.py", r"epoch  1   loss \d\.\d{4}   held-out accuracy [01]\.\d{4}"),
    ],
    ids=["uneven", "amp", "lightning"],
)
def test_all_ranks_agree(name: str, told: str) -> None:
    epoch, verdict = _on_two(name, "--epochs", "1")
    assert re.fullmatch(told, epoch)
    assert re.fullmatch(AGREE, verdict)


def test_a_rank_is_killed_and_the_result_is_the_same(tmp_path: Path) -> None:
    """The images of each step are; the order of the additions is not."""
    undisturbed = _elastic(tmp_path / "undisturbed", ())
    disturbed = _elastic(tmp_path / "disturbed", (1,))
    assert [line for line in undisturbed if line.startswith("parameters")]
    assert _accuracies(disturbed) == pytest.approx(_accuracies(undisturbed), abs=0.02)
    assert "ranks 1" in disturbed[-2]
    assert disturbed[-1].startswith("parameters: bit for bit the same on 1 of 1 ranks")


def test_the_result_does_not_depend_on_random_events() -> None:
    """With this seed one rank is killed, another one gets SIGTERM, and others join."""
    lines = _lines(sys.executable, str(EXAMPLES / "elastic_same_result.py"), "--events", "3", "--seed", "33")
    assert lines[0].endswith("SIGKILL to rank 2: 3 -> 2 ranks")
    assert re.search(r"SIGTERM to rank \d: 2 -> 1 ranks", lines[1])
    assert re.search(r"joined: 1 -> \d ranks", lines[2])
    found = re.fullmatch(r"\d+ epochs, 3 events: relative difference (\S+)", lines[3])
    assert found
    assert float(found[1]) < 1e-9


def _elastic(folder: Path, victims: Sequence[int]) -> list[str]:
    """The lines of rank 0, of a job in which the processes ``victims`` are killed when they train."""
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": startup.PATH}
    command = [*HVDRUN, "-np", "2", "--min-np", "1", sys.executable, str(EXAMPLES / "elastic_digits.py")]
    pause = ["--pause", "0.02"] if victims else []  # so that they still train when the kill comes
    with (folder / "err").open("w") as err:
        job = subprocess.Popen(
            [*command, "--epochs", "2", *pause], stdout=subprocess.PIPE, stderr=err, text=True, env=environment
        )
        assert job.stdout is not None
        lines = []
        for line in job.stdout:
            lines.append(line.rstrip())
            found = re.fullmatch(r"\[(\d)\]<stdout>:rank \d of 2 is process (\d+)", lines[-1])
            if found and int(found[1]) in victims:
                os.kill(int(found[2]), signal.SIGKILL)
        job.stdout.close()
        assert job.wait(60) == 0, (folder / "err").read_text()
    return [line.removeprefix("[0]<stdout>:") for line in lines if line.startswith("[0]")]


def _accuracies(lines: Sequence[str]) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith("epoch")]


def test_a_script_for_horovod() -> None:
    lines = _on_two("horovod_digits.py", "--epochs", "1", "--fp16-allreduce", options=["--horovod-alias"])
    assert re.fullmatch(r"Train Epoch: 1 \[0/719\]\tLoss: \d\.\d{6}", lines[0])
    assert re.fullmatch(r"Test set: Average loss: \d\.\d{4}, Accuracy: \d+\.\d\d%", lines[-1])


def test_synthetic_benchmark() -> None:
    small = ["--batch-size=2", "--num-warmup-batches=1", "--num-batches-per-iter=1", "--num-iters=2"]
    lines = _on_two("synthetic_benchmark.py", "--model=mlp", "--fp16-allreduce", *small)
    iterations = [line for line in lines if re.fullmatch(r"Iter #\d: \d+\.\d img/sec per rank", line)]
    assert len(iterations) == 2
    assert re.fullmatch(r"Img/sec per rank: \d+\.\d \+-\d+\.\d", lines[-2])
    assert re.fullmatch(r"Total img/sec on 2 rank\(s\): \d+\.\d \+-\d+\.\d", lines[-1])


def test_fine_tuning_freezes_the_lower_half() -> None:
    small = ["--pretrain-steps=10", "--steps=10", "--batch-size=2"]
    lines = _on_two("transformer_finetune.py", *small)
    told = r"(.{20}) +([\d,]+) parameters learn   held-out loss (\d\.\d{3}) -> (\d\.\d{3})"
    rows = [re.fullmatch(told, line) for line in lines]
    assert [row and row[1].strip() for row in rows] == ["pretrained", "fine-tuned", "from scratch"]
    counts = [int(row[2].replace(",", "")) for row in rows if row]
    assert counts[1] < counts[0] == counts[2]
    assert lines[0].split()[-1] == lines[1].split()[-3]  # it goes on where the first training has ended


def test_a_resnet(tmp_path: Path) -> None:
    small = ["--epochs=1", "--width=2", "--batch-size=64", "--picture", str(tmp_path / "resnet.png")]
    [epoch] = _on_two("resnet_cifar.py", *small)
    assert re.fullmatch(r"epoch  1   loss \d\.\d{4}   held-out accuracy [01]\.\d{4}   [\d,]+ images/s", epoch)
    assert (tmp_path / "resnet.png").read_bytes().startswith(b"\x89PNG")


def test_a_gan() -> None:
    lines = _on_two("gan_ring.py", "--steps=8", "--batch-size=8")
    told = [re.fullmatch(r"step +(\d+)   clouds found \d of 8   points in a cloud .*%", line) for line in lines]
    assert [line and int(line[1]) for line in told] == [0, 2, 4, 6, 8]


def test_adasum_needs_fewer_steps_at_a_small_rate() -> None:
    """The start and the order of the images have a seed, so the numbers of steps are always the same."""
    title, _, row = _on_two("adasum_digits.py", "--rates=0.1", "--goal=0.8", "--most-steps=100")
    assert title == "steps to an accuracy of 0.8, 2 ranks x 64 images"
    average, adasum = map(int, row.split()[1:])
    assert adasum < average


def test_no_step_is_lost_on_preempted_nodes() -> None:
    _, *events, end = _lines(sys.executable, str(EXAMPLES / "elastic_preempted.py"), "--pause", "2")
    assert [re.sub(r" {2,}.*", "", line) for line in events] == [
        "spot-2 gets a notice",
        "spot-4 comes",
        "spot-3 dies",
        "spot-5 comes",
    ]
    assert all(re.fullmatch(r".* s +0 +\d+", line) for line in events)
    assert re.fullmatch(r"\d+ steps, accuracy [01]\.\d{4}", end)


def test_every_model_of_the_synthetic_benchmark_learns() -> None:
    models = runpy.run_path(str(EXAMPLES / "synthetic_benchmark.py"))["MODELS"]
    assert set(models) == {"cnn", "mlp", "vit"}
    for make in models.values():
        network = make()
        network(torch.randn(2, 3, 32, 32)).sum().backward()
        assert all(parameter.grad is not None for parameter in network.parameters())


def test_make_and_the_readme_know_all_examples() -> None:
    for page in ("Makefile", "README.md"):
        text = (ROOT / page).read_text()
        assert not [path.name for path in EXAMPLES.glob("*.py") if f"examples/{path.name}" not in text]


def _on_two(name: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    lines = _lines(*HVDRUN, *options, "-np", "2", sys.executable, str(EXAMPLES / name), *arguments)
    assert all(line.startswith("[0]<stdout>:") for line in lines)
    return [line.removeprefix("[0]<stdout>:") for line in lines]


def _lines(*command: str) -> list[str]:
    run = _run(*command)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": startup.PATH}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=200, env=environment)
