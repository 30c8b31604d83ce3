"""The alias: ``import horovod`` gives hvd_cluster, where it was asked for and nowhere else."""

import importlib
import importlib.util
import inspect
import os
import pickle
import pkgutil
import site
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

import hvd_cluster
from hvd_cluster import data, horovod
from hvd_cluster.horovod.__main__ import main

hvd = pytest.importorskip("hvd_cluster.torch")

ROOT = Path(__file__).parents[3]
HVDRUN = sys.executable, "-m", "hvd_cluster", "--horovod-alias", "-np", "2", sys.executable
ALIASED = sys.executable, "-m", "hvd_cluster.horovod"


def python(*arguments, path=(), **variables):
    """Runs Python with what is tested and ``path`` on PYTHONPATH; its standard output."""
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)])}
    command = [str(argument) for argument in arguments]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=90, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


def modules():
    """Names under Horovod and under hvd_cluster."""
    moved = [("horovod.common.exceptions", "hvd_cluster.exceptions")]
    packages = [data, hvd]
    names = [package.__name__ for package in packages]
    for package in packages:
        names += [found.name for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return moved + [(f"horovod{name.removeprefix('hvd_cluster')}", name) for name in names]


@pytest.mark.parametrize(("name", "real"), modules())
def test_a_module_is_ours_itself(horovod_alias, name, real):
    ours = importlib.import_module(real)
    spec = ours.__spec__
    assert importlib.import_module(name) is ours
    assert (ours.__name__, ours.__spec__) == (real, spec)
    assert importlib.util.find_spec(name) is not None


def test_every_way_to_import(horovod_alias):
    namespace = {}
    exec(
        "import horovod\n"
        "import horovod.torch as imported\n"
        "from horovod import torch as taken\n"
        "from horovod.torch import compression, allreduce\n"
        "from horovod.torch.elastic.sampler import ElasticSampler\n"
        "from horovod.common import exceptions, process_sets, util\n"
        "from horovod.common.process_sets import ProcessSet, add_process_set\n",
        namespace,
    )
    for name in ("imported", "taken"):
        assert namespace[name] is hvd
    assert namespace["horovod"].torch is hvd
    assert namespace["compression"] is sys.modules["hvd_cluster.torch.compression"]
    for name in ("allreduce", "ProcessSet", "add_process_set"):
        assert namespace[name] is getattr(hvd, name)
    assert namespace["ElasticSampler"] is hvd.elastic.ElasticSampler


def test_patching_one_patches_the_other(horovod_alias, monkeypatch):
    monkeypatch.setattr("horovod.torch.allreduce", "patched")
    assert hvd.allreduce == "patched"


def test_classes_keep_their_home(horovod_alias):
    compression = importlib.import_module("horovod.torch.compression").Compression
    assert compression.__module__ == "hvd_cluster.torch.compression"
    assert pickle.loads(pickle.dumps(compression)) is compression
    # What was pickled where Horovod was installed.
    assert pickle.loads(pickle.dumps(compression, protocol=0).replace(b"hvd_cluster.", b"horovod.")) is compression


def test_a_module_can_be_loaded_again(horovod_alias):
    exceptions = importlib.import_module("horovod.common.exceptions")
    assert importlib.reload(exceptions) is sys.modules["hvd_cluster.exceptions"]
    assert inspect.getsourcefile(exceptions) == str(ROOT / "hvd_cluster" / "exceptions.py")


def test_horovod_itself(horovod_alias):
    module = importlib.import_module("horovod")
    assert module.__version__.startswith("0.28.1+")
    assert module.run is hvd_cluster.run


def test_the_old_place_of_run_is_gone_and_run_stays(horovod_alias):
    """Programs such as ignite look there first, and take the new place where that is an ImportError."""
    run = hvd_cluster.run
    for name in ("horovod.run", "horovod.run.runner", "hvd_cluster.run", "hvd_cluster.metrics"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
    assert run is hvd_cluster.run is importlib.import_module("horovod").run
    assert inspect.isfunction(run)


STAND_IN = f"hvd-cluster {hvd_cluster.__version__}, which stands in for Horovod here, does not have "


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("import horovod.caffe", "horovod.caffe"),
        ("from horovod import caffe", "horovod.caffe"),
        ("import horovod.caffe.mpi_ops", "horovod.caffe"),
        ("import horovod.torch.nothing", "horovod.torch.nothing"),
        ("from horovod.runner.js_run import js_run", "horovod.runner.js_run"),
        ("import horovod.common.nothing", "horovod.common.nothing"),
    ],
)
def test_a_module_that_we_do_not_have(horovod_alias, statement, name):
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(statement)
    assert str(caught.value) == STAND_IN + name


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("horovod", "horovod.nothing"),
        ("horovod.common.process_sets", "horovod.common.process_sets.nothing"),
        ("horovod.common.util", "horovod.common.util.nothing"),
        ("horovod.torch", "horovod.torch.nothing"),
        ("horovod.torch.mpi_ops", "horovod.torch.mpi_ops.nothing"),
        ("horovod.common.exceptions", "horovod.common.exceptions.nothing"),
    ],
)
def test_a_name_that_we_do_not_have(horovod_alias, module, said):
    with pytest.raises(ImportError) as caught:
        exec(f"from {module} import nothing")
    assert str(caught.value) == STAND_IN + said
    with pytest.raises(AttributeError) as missing:
        importlib.import_module(module).nothing  # noqa: B018  the access is what is tested
    assert str(missing.value) == STAND_IN + said
    assert not hasattr(importlib.import_module(module), "nothing")


def test_a_module_that_is_not_imported_yet(alias_undone):
    script = (
        "import horovod\n"
        "try:\n    horovod.torch\n"
        "except AttributeError as error:\n    print(error)\n"
        "import horovod.torch\n"
        "print(horovod.torch.elastic.run.__module__)\n"
    )
    told = python(sys.executable, "-c", script, path=[horovod.STARTUP])
    assert told == "horovod.torch is not imported yet; say import horovod.torch first\nhvd_cluster.elastic.loop\n"


def test_a_question_is_not_an_import(horovod_alias):
    """Only what is imported must be there."""
    for name in ("horovod.caffe", "horovod.torch.nothing", "horovod.common.nothing", "hvd_cluster.torch.nothing"):
        assert importlib.util.find_spec(name) is None
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'hvd_cluster\.nothing'$"):
        exec("import hvd_cluster.nothing")


def test_what_is_known_of_the_release(horovod_alias):
    version = importlib.import_module("horovod").__version__
    assert metadata.version("horovod") == metadata.version("Horovod") == version
    assert Version(version) >= Version("0.28.1")
    known = metadata.distribution("horovod")
    assert (known.metadata["Name"], known.requires, known.files, list(known.entry_points)) == (
        "horovod",
        None,
        None,
        [],
    )
    assert metadata.version("pytest") == pytest.__version__
    assert "horovod" not in {each.metadata["Name"] for each in metadata.distributions()}


def test_nothing_is_known_of_the_release_unless_asked(tmp_path):
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("horovod")
    script = "import sys, importlib.metadata as m; print('hvd_cluster' in sys.modules, m.version('horovod'))"
    assert python(sys.executable, "-c", script, path=[horovod.STARTUP]) == "False 0.28.1+hvd.cluster\n"


def test_nothing_is_aliased_unless_asked():
    assert not horovod.is_requested()
    assert importlib.util.find_spec("horovod") is None
    script = "import sys, hvd_cluster.torch, hvd_cluster.horovod; print('horovod' in sys.modules)"
    assert python(sys.executable, "-c", script) == "False\n"


def test_installing_twice(horovod_alias):
    before, variable = list(sys.meta_path), os.environ["PYTHONPATH"]
    horovod.install()
    assert (sys.meta_path, os.environ["PYTHONPATH"]) == (before, variable)
    assert variable == f"{horovod.STARTUP}{os.pathsep}/of/the/user"
    assert horovod.is_requested()


@pytest.fixture
def another(tmp_path):
    """A folder with a Horovod that is not ours."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("__version__ = 'not ours'\n")
    return tmp_path


def test_a_horovod_that_is_installed_is_hidden(alias_undone, another, monkeypatch, caplog):
    monkeypatch.syspath_prepend(another)
    horovod.install()
    assert importlib.import_module("horovod").__version__.startswith("0.28.1+")
    [said] = caplog.messages
    assert said.startswith("import horovod gives hvd-cluster ")
    assert said.endswith(f" here, not the Horovod in {another}/horovod/__init__.py")


def test_a_horovod_that_is_imported_stays(alias_undone, another, monkeypatch):
    monkeypatch.syspath_prepend(another)
    module = importlib.import_module("horovod")
    with pytest.raises(ImportError, match=f"the Horovod in {another}.* has been imported already; call"):
        horovod.install()
    assert importlib.import_module("horovod") is module
    assert not horovod.is_requested()


FAMILY = """
import horovod.torch as hvd
import multiprocessing
import subprocess
import sys
import torch.utils.data

import hvd_cluster.torch


class Identity(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return same()


def same():
    import horovod.torch

    return horovod.torch is hvd_cluster.torch


def tell(queue):
    queue.put(same())


def spawned(method):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=tell, args=(queue,))
    process.start()
    answer = queue.get()
    process.join()
    return answer


if __name__ == "__main__":
    hvd.init()
    child = "import horovod.torch, hvd_cluster.torch; print(horovod.torch is hvd_cluster.torch)"
    print(*sys.argv[1:], hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
    print("child", subprocess.check_output([sys.executable, "-c", child], text=True).strip())
    print("spawn", spawned("spawn"))
    print("loader", [bool(value) for value in torch.utils.data.DataLoader(Identity(), num_workers=1)])
"""


@pytest.mark.parametrize(
    ("launcher", "size", "prefixes"),
    [(HVDRUN, 2, ["[0]<stdout>:", "[1]<stdout>:"]), (ALIASED, 1, [""])],
    ids=["hvdrun", "module"],
)
def test_it_reaches_children(tmp_path, another, launcher, size, prefixes):
    script = tmp_path / "family.py"
    script.write_text(FAMILY)
    lines = python(*launcher, script, "argument", "--option").splitlines()
    told = [f"argument --option {size}.0", "child True", "spawn True", "loader [True]"]
    assert sorted(lines) == sorted(prefix + line for prefix in prefixes for line in told)


def test_functions_that_are_run(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        "import horovod\n"
        "def train():\n"
        "    import horovod.torch as hvd\n"
        "    hvd.init()\n"
        "    return hvd.__name__, hvd.size()\n"
        "print(horovod.run(train, num_proc=2))\n"
    )
    assert python(*ALIASED, script) == f"{[('hvd_cluster.torch', 2)] * 2}\n"


def test_a_module_that_is_run(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(
        "import sys, horovod.torch as hvd; print(__name__, sys.argv[1:], hvd.__name__)\n"
    )
    told = python(*ALIASED, "-m", "package.train", "argument", "--option", path=[tmp_path])
    assert told == "__main__ ['argument', '--option'] hvd_cluster.torch\n"


def test_the_launcher_that_is_run_as_a_module():
    script = "import horovod.torch as hvd; hvd.init(); print(hvd.size())"
    told = python(*ALIASED, "-m", "horovod.runner.launch", "-np", "2", sys.executable, "-c", script)
    assert sorted(told.splitlines()) == ["[0]<stdout>:2", "[1]<stdout>:2"]


def test_the_launcher_that_is_called(horovod_alias):
    launch = importlib.import_module("horovod.runner.launch")
    with pytest.raises(SystemExit) as caught:
        launch.run_commandline(["-np", "1", sys.executable, "-c", "raise SystemExit(3)"])
    assert caught.value.code == 3
    assert importlib.import_module("horovod.runner").run is hvd_cluster.run


def test_the_sitecustomize_of_the_user_runs_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("value = __name__\n")
    script = "import sys, sitecustomize as it; print(it.value, it.__file__, 'hvd_cluster' in sys.modules)"
    told = python(sys.executable, "-c", script, path=[horovod.STARTUP, tmp_path])
    assert told == f"sitecustomize {tmp_path}/sitecustomize.py False\n"


def test_a_child_finds_us_where_its_path_does_not_lead_to_us(tmp_path):
    """As that of a driver that was started in our folder; -S leaves out the packages, of which we may be one."""
    script = "import sys, sitecustomize; sys.path += sys.argv[1:]; import horovod; print(horovod.__version__)"
    environment = {**os.environ, "PYTHONPATH": horovod.STARTUP}
    command = [sys.executable, "-S", "-c", script, *site.getsitepackages()]
    told = subprocess.check_output(command, env=environment, cwd=tmp_path, text=True)
    assert told.startswith("0.28.1+")


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--option", "train.py"]])
def test_without_a_script(monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["hvd_cluster/horovod/__main__.py", *arguments])
    with pytest.raises(SystemExit, match=r"usage: python -m hvd_cluster\.horovod script\.py"):
        main()
