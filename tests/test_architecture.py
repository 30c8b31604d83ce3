"""The arrows of docs/architecture.md, and what the packages show to the outside."""

import ast
import functools
import importlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

import collectives
from hvd_cluster import common_api

ROOT = Path(__file__).parents[1]
LAYERS = ("collectives", "executors", "hvd_cluster")  # each may import itself and those before it
FRAMEWORKS = {"torch", "tensorflow", "keras", "mxnet", "jax", "lightning"}
CLUSTERS = {"ray", "pyspark"}
BACKEND_LIBRARIES = {"torch", "mpi4py", "cupy", "nccl", "pygloo"}
ARRAYS = {"numpy"}


@dataclass(frozen=True)
class Import:
    """``module`` is what follows the word import or from; ``lazy`` means inside a function."""

    path: str
    line: int
    module: str
    lazy: bool

    @property
    def top(self):
        return self.module.split(".")[0]

    @property
    def layer(self):
        return self.path.split("/")[0]


def test_mypy_ignores_no_module_that_is_not_imported():
    """As text: Python 3.10 has no parser for this format."""
    overrides = (ROOT / "pyproject.toml").read_text().partition("[[tool.mypy.overrides]]")[2].partition("]\n")[0]
    ignored = set(re.findall(r'"([^"]+)\.\*"', overrides))
    assert ignored
    assert not ignored - {each.top for each in _imports()}


def _sources():
    return [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]


def _parse(path):
    return ast.parse(path.read_text(), str(path))


@functools.cache  # each of a dozen tests would parse all sources again
def _imports():
    return tuple(found for path in _sources() for found in _imports_of(path))


def _imports_of(path):
    """All imports but those for type checkers only."""
    stack = [(child, False) for child in ast.iter_child_nodes(_parse(path))]
    while stack:
        node, lazy = stack.pop()
        if _is_type_checking(node):
            stack.extend((child, lazy) for child in node.orelse)
            continue
        for module in _modules(node):
            yield Import(path.relative_to(ROOT).as_posix(), node.lineno, module, lazy)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        stack.extend((child, inside) for child in ast.iter_child_nodes(node))


def _is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _modules(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + (node.module or "")]
    return []


def _where(found):
    return [f"{each.path}:{each.line} imports {each.module}" for each in found]


def test_the_sources_are_found():
    assert {path.parts[len(ROOT.parts)] for path in _sources()} == set(LAYERS)
    assert len(_imports()) > 200


def test_every_folder_is_a_package():
    """Others are left out of a wheel."""
    assert not [path for path in _sources() if not (path.parent / "__init__.py").exists()]


def test_no_module_shadows_a_name_of_its_package():
    """The import of a submodule binds its name in its package: a function of that name would be gone."""
    shadows = []
    for init in [path for path in _sources() if path.name == "__init__.py"]:
        package = ".".join(init.parent.relative_to(ROOT).parts)
        modules = {path.stem for path in init.parent.glob("*.py")} | {
            path.parent.name for path in init.parent.glob("*/__init__.py")
        }
        bound = _bound_in(_parse(init))
        shadows += [f"{package}.{name}" for name in modules & bound.keys() if bound[name] != package]
    assert shadows == []


def _bound_in(tree):
    """The public names that ``tree`` binds on its top level, each with the module that it is imported from."""
    bound = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name: node.module for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound[node.name] = None
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound |= {target.id: None for target in targets if isinstance(target, ast.Name)}
    return bound


def test_arrows_only_point_downwards():
    wrong = [each for each in _imports() if each.top in LAYERS and LAYERS.index(each.top) > LAYERS.index(each.layer)]
    assert not _where(wrong)


FACADES = ("collectives", "executors", *(f"executors.agents.{name}" for name in ("hosts", "mpi", "ray", "spark")))


def test_the_layers_above_import_from_the_facades_only():
    """A facade is the ``__init__`` of a package; what the layers above do not find there is no business of theirs."""
    across = [each for each in _imports() if each.top in LAYERS and each.top != each.layer]
    assert len(across) > 100
    assert not _where([each for each in across if each.module not in FACADES])


@pytest.mark.parametrize("package", FACADES)
def test_a_facade_loads_the_names_that_mypy_sees(package):
    block = _facade(package)
    listed = {(alias.asname or alias.name, f"{node.module}.{alias.name}") for node, alias in _names_in(block.body)}
    tables = [ast.literal_eval(table) for table in block.orelse[0].value.args[1:]]
    names = {(name, f"{package}.{module}.{name}") for module, text in tables[0].items() for name in text.split()}
    modules = {(name, f"{package}.{module}") for table in tables[1:] for name, module in table.items()}
    assert listed == names | modules


@pytest.mark.parametrize("package", FACADES)
def test_a_facade_has_no_name_that_nobody_uses(package):
    used = {name for module, name in _imported() if module == package}
    assert not {alias.asname or alias.name for _, alias in _names_in(_facade(package).body)} - used


@functools.cache
def _imported():
    """Each module from which a name is imported, with the name."""
    return {(node.module, alias.name) for path in _sources() for node, alias in _names_in(ast.walk(_parse(path)))}


def _facade(package):
    tree = _parse(ROOT / package.replace(".", "/") / "__init__.py")
    return next(node for node in tree.body if _is_type_checking(node))


def _names_in(nodes):
    return [(node, alias) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]


def test_a_facade_says_which_name_it_lacks():
    with pytest.raises(AttributeError, match="module 'collectives' has no attribute 'missing'"):
        _ = collectives.missing


FOLDERS = {
    "collectives": ["controller", "net", "stalls", "store", "handshake", "kernels", "backends", "engine", "observe"],
    "executors": ["membership", "job", "launchers", "dashboard", "driver", "agents"],
    "hvd_cluster": ["core", "ops", "comparison", "gradients", "elastic", "graphs", "torch"],
}
"""The folders of a layer, each of which may import itself and those before it. Others are not in this order."""


@pytest.mark.parametrize("layer", FOLDERS)
def test_arrows_between_folders_only_point_downwards(layer):
    order = FOLDERS[layer]
    wrong = [
        each
        for each in _imports()
        if (folder := each.path.split("/")[1]) in order
        and each.module.startswith(f"{layer}.")
        and (other := each.module.split(".")[1]) in order
        and order.index(other) > order.index(folder)
    ]
    assert not _where(wrong)


def test_imports_of_ours_are_absolute():
    assert not _where(each for each in _imports() if each.module.startswith("."))


def test_collectives_binds_a_library_only_in_its_backend_and_only_when_needed():
    foreign = FRAMEWORKS | CLUSTERS | BACKEND_LIBRARIES
    wrong = [
        each
        for each in _imports()
        if each.layer == "collectives"
        and each.top in foreign
        and not (each.lazy and each.top in BACKEND_LIBRARIES and each.path.startswith("collectives/backends/"))
    ]
    assert not _where(wrong)


def test_executors_know_no_tensors():
    wrong = [
        each for each in _imports() if each.layer == "executors" and each.top in FRAMEWORKS | BACKEND_LIBRARIES | ARRAYS
    ]
    assert not _where(wrong)


@pytest.mark.parametrize("cluster", ["ray", "spark"])
def test_a_cluster_is_known_in_its_own_folder_only(cluster):
    library = {"ray": "ray", "spark": "pyspark"}[cluster]
    homes = (f"executors/agents/{cluster}/", f"hvd_cluster/{cluster}/")
    wrong = [each for each in _imports() if each.top == library and not each.path.startswith(homes)]
    assert not _where(wrong)


def test_a_framework_is_known_in_its_own_binding_only():
    """Rooms beside a binding serve all bindings. A Shard makes the data set of a framework when it is asked for one."""
    frameworks = [each for each in _imports() if each.layer == "hvd_cluster" and each.top in FRAMEWORKS]
    # The part of a cluster for one framework, such as an estimator, has a folder of its name.
    homes = ("hvd_cluster", "hvd_cluster/spark", "hvd_cluster/ray")
    others = {
        "torch": ("hvd_cluster/lightning/", "hvd_cluster/spark/lightning/")
    }  # Lightning is a part of torch's world
    elsewhere = [
        each
        for each in frameworks
        if not each.path.startswith((*(f"{home}/{each.top}/" for home in homes), *others.get(each.top, ())))
    ]
    assert not _where(each for each in elsewhere if not (each.lazy and each.path.startswith("hvd_cluster/spark/")))


def test_rooms_of_all_bindings_know_no_binding():
    """Horovod's package _keras stands for a binding."""
    bindings = tuple(f"hvd_cluster.{name}" for name in FRAMEWORKS)
    wrong = [each for each in _imports() if each.layer == "hvd_cluster" and each.module.startswith(bindings)]
    assert not _where(each for each in wrong if not (FRAMEWORKS | {"_keras"}) & set(each.path.split("/")))


LIBRARIES = ("hvd_cluster/tensorflow/native/", "hvd_cluster/tensorflow/data/", "hvd_cluster/torch/powersgd.py")
OWN = ("hvd_cluster/torch/optimizer/", "hvd_cluster/tensorflow/xla/")


def test_a_binding_is_thin():
    """At most 1,700 statements: tensors, autograd, modules, states, streams. Shared code lies below.

    TensorFlow's C API in Python, the data service and PowerSGD are libraries of their own, which no binding has twice.
    So is torch's optimizer: only torch reports one gradient after the other while backward runs. The others know all
    gradients of a step at once, and share the code for that. So are TensorFlow's compiled functions, a second kind of
    graph; what they share with JAX lies below.
    """
    sizes = {name: sum(map(_statements, _binding(name))) for name in FRAMEWORKS}
    assert sizes["torch"] > 500
    assert sizes["tensorflow"] > 500
    assert all(size <= 1700 for size in sizes.values()), sizes


def _binding(name):
    found = (ROOT / "hvd_cluster" / name).rglob("*.py")
    return [path for path in found if not path.relative_to(ROOT).as_posix().startswith((*LIBRARIES, *OWN))]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_beside_a_binding_does_not_need_it(library):
    """It may know the dtypes."""
    allowed = (library.replace("/", ".").rstrip("."), "hvd_cluster.tensorflow.tensors")
    found = [each for each in _imports() if each.path.startswith(library)]
    assert found
    assert not _where(
        each
        for each in found
        if each.module.startswith("hvd_cluster.tensorflow") and not each.module.startswith(allowed)
    )


def _statements(path):
    return sum(isinstance(node, ast.stmt) for node in ast.walk(_parse(path)))


def test_value_objects_import_nothing_of_ours():
    found = [each for each in _imports() if each.path.endswith("/api.py")]
    assert {each.path for each in found} >= {"collectives/api.py", "executors/api.py"}
    assert not _where(each for each in found if each.top in LAYERS)


def test_nothing_prints():
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in _sources()
        for node in ast.walk(_parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not calls


def test_importing_brings_in_no_framework_no_cluster_and_no_server():
    script = (
        "import json, sys, hvd_cluster.core.basics, collectives.engine.start, executors.agents.hosts.job;"
        "json.dump(sorted(sys.modules), sys.stdout)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=True, timeout=60)
    assert not set(json.loads(done.stdout)) & (FRAMEWORKS | CLUSTERS | BACKEND_LIBRARIES | {"aiohttp"})


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("hvd_cluster", {"numpy", "ctypes"}),
        ("hvd_cluster.core.features", {"executors.driver.driver", "executors.agents"}),
        ("executors.agents.local.task", {"numpy", "asyncio", "importlib.metadata"}),
    ],
)
def test_what_starts_often_imports_little(module, heavy):
    script = f"import json, sys, {module}; json.dump(sorted(sys.modules), sys.stdout)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=True, timeout=60)
    assert not set(json.loads(done.stdout)) & heavy


def test_folders_and_modules_have_a_size_that_a_reader_can_hold():
    folders, small = {}, []
    for path in [path for path in _sources() if path.name != "__init__.py"]:
        folders.setdefault(path.parent, []).append(path)
        small += [path] if path.read_text().count("\n") < 60 else []
    assert not [folder for folder, modules in folders.items() if len(modules) > 18]
    assert len(small) <= 40, small
    assert (ROOT / "docs" / "architecture.md").read_text().count("\n") <= 350


def test_a_class_has_one_meaning():
    """Compressors and states have the same name in each binding, because users write them."""
    homes = {}
    for path in _sources():
        for node in _parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(path)
    assert len({name for name, paths in homes.items() if len(paths) > 1}) <= 5, homes


SURFACE = {
    "hvd_cluster": ["HorovodInternalError", "HostsUpdatedInterrupt", "__version__", "count_samples", "metrics", "run"],
    "hvd_cluster.data": ["AsyncDataLoaderMixin", "BaseDataLoader"],
    "hvd_cluster.data.compute": ["ComputeClient", "ComputeService"],
    "hvd_cluster.elastic": ["GlobalBatches", "ObjectState", "State", "drain", "run"],
    "hvd_cluster.horovod": ["install", "is_requested", "search_path"],
    "hvd_cluster.keras": [
        *common_api.__all__,
        "Compression",
        "DistributedOptimizer",
        "MetricLogger",
        "PartialDistributedOptimizer",
        "RankFilter",
        "SyncBatchNormalization",
        "allgather",
        "allreduce",
        "broadcast",
        "broadcast_global_variables",
        "callbacks",
        "checkpoint",
        "count_samples",
        "elastic",
        "evaluate",
        "load_model",
        "metrics",
        "print_once",
        "reducescatter",
        "set_seed",
    ],
    "hvd_cluster.keras.callbacks": [
        "BestModelCheckpoint",
        "BroadcastGlobalVariablesCallback",
        "EvaluateCallback",
        "LearningRateScheduleCallback",
        "LearningRateWarmupCallback",
        "MetricAverageCallback",
        "MetricLoggerCallback",
    ],
    "hvd_cluster.keras.elastic": [
        "CommitStateCallback",
        "GlobalBatches",
        "KerasState",
        "ObjectState",
        "State",
        "UpdateBatchStateCallback",
        "UpdateEpochStateCallback",
        "drain",
        "rest_of_epoch",
        "run",
    ],
    "hvd_cluster.lightning": ["HorovodEnvironment", "HorovodFabricStrategy", "HorovodStrategy"],
    "hvd_cluster.lightning.pytorch_lightning": ["HorovodEnvironment", "HorovodFabricStrategy", "HorovodStrategy"],
    "hvd_cluster.mxnet": [
        *common_api.__all__,
        "Compression",
        "DistributedOptimizer",
        "DistributedTrainer",
        "HorovodInternalError",
        "Max",
        "MetricLogger",
        "Min",
        "Product",
        "RankFilter",
        "allgather",
        "allgather_object",
        "allreduce",
        "allreduce_",
        "alltoall",
        "broadcast",
        "broadcast_",
        "broadcast_object",
        "broadcast_parameters",
        "count_samples",
        "grouped_allgather",
        "grouped_allreduce",
        "grouped_allreduce_",
        "grouped_reducescatter",
        "metrics",
        "print_once",
        "reducescatter",
        "set_seed",
    ],
    "hvd_cluster.spark": ["ElasticShard", "Shard", "run", "run_elastic", "run_on_dataframe"],
    "hvd_cluster.spark.conf": [
        "SPARK_CONF_ALWAYS_RESTART_FAILED_TASK",
        "SPARK_CONF_BLACKLIST_DISABLED",
        "SPARK_CONF_BLACKLIST_ENABLED",
        "SPARK_CONF_DEFAULT_VALUES",
        "SPARK_CONF_DONT_REUSE_EXECUTOR_FOR_SAME_TASK",
        "SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR",
        "SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_APP",
        "SPARK_CONF_DONT_REUSE_FAILING_NODE",
        "SPARK_CONF_DONT_REUSE_FAILING_NODE_IN_APP",
        "SPARK_CONF_DONT_REUSE_NODE_FOR_SAME_TASK",
        "SPARK_CONF_MAX_INT",
        "SPARK_CONF_MAX_INT_MINUS_ONE",
        "SPARK_CONF_REUSE_EXECUTOR_ALWAYS_FOR_SAME_TASK",
        "SPARK_CONF_REUSE_EXECUTOR_ONCE_FOR_SAME_TASK",
        "SPARK_CONF_REUSE_FAILED_EXECUTOR",
        "SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_APP",
        "SPARK_CONF_REUSE_FAILING_NODE",
        "SPARK_CONF_REUSE_FAILING_NODE_IN_APP",
        "SPARK_CONF_REUSE_NODE_ALWAYS_FOR_SAME_TASK",
        "SPARK_CONF_REUSE_NODE_ONCE_FOR_SAME_TASK",
    ],
    "hvd_cluster.spark.lightning": ["LightningEstimator", "LightningModel", "TorchEstimator", "TorchModel"],
    "hvd_cluster.spark.keras": ["KerasEstimator", "KerasModel"],
    "hvd_cluster.spark.task": ["get_available_devices"],
    "hvd_cluster.spark.torch": ["EarlyStopping", "FitCallback", "SchedulerCallback", "TorchEstimator", "TorchModel"],
    "hvd_cluster.tensorflow": [
        *common_api.__all__,
        "BroadcastGlobalVariablesHook",
        "Compression",
        "DistributedGradientTape",
        "DistributedOptimizer",
        "HorovodInternalError",
        "LocalGradientAggregationHelper",
        "LocalGradientAggregationHelperEager",
        "Max",
        "MetricLogger",
        "Min",
        "PartialDistributedGradientTape",
        "Product",
        "RankFilter",
        "SyncBatchNormalization",
        "allgather",
        "allgather_object",
        "allreduce",
        "alltoall",
        "barrier",
        "broadcast",
        "broadcast_",
        "broadcast_global_variables",
        "broadcast_object",
        "broadcast_object_fn",
        "broadcast_variables",
        "check_extension",
        "checkpoint",
        "count_samples",
        "elastic",
        "grouped_allgather",
        "grouped_allreduce",
        "grouped_reducescatter",
        "join",
        "local_rank_op",
        "local_size_op",
        "metrics",
        "print_once",
        "process_set_included_op",
        "rank_op",
        "reducescatter",
        "set_seed",
        "size_op",
    ],
    "hvd_cluster.tensorflow.data": [
        *("TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"),
    ],
    "hvd_cluster.tensorflow.elastic": [
        "GlobalBatches",
        "ObjectState",
        "State",
        "TensorFlowKerasState",
        "TensorFlowState",
        "drain",
        "run",
    ],
    "hvd_cluster.tensorflow.keras": [
        *common_api.__all__,
        "Compression",
        "DistributedOptimizer",
        "MetricLogger",
        "PartialDistributedOptimizer",
        "RankFilter",
        "SyncBatchNormalization",
        "allgather",
        "allreduce",
        "broadcast",
        "broadcast_global_variables",
        "callbacks",
        "checkpoint",
        "count_samples",
        "elastic",
        "evaluate",
        "load_model",
        "metrics",
        "print_once",
        "reducescatter",
        "set_seed",
    ],
    "hvd_cluster.torch": [
        *common_api.__all__,
        "Compression",
        "DistributedOptimizer",
        "GradientCompressor",
        "HorovodInternalError",
        "Max",
        "MetricLogger",
        "Min",
        "Product",
        "RankFilter",
        "SyncBatchNorm",
        "allgather",
        "allgather_async",
        "allgather_object",
        "allreduce",
        "allreduce_",
        "allreduce_async",
        "allreduce_async_",
        "alltoall",
        "alltoall_async",
        "barrier",
        "broadcast",
        "broadcast_",
        "broadcast_async",
        "broadcast_async_",
        "broadcast_object",
        "broadcast_optimizer_state",
        "broadcast_parameters",
        "check_extension",
        "checkpoint",
        "clip_grad_norm_",
        "count_samples",
        "elastic",
        "full_state_dict",
        "grouped_allgather",
        "grouped_allgather_async",
        "grouped_allreduce",
        "grouped_allreduce_",
        "grouped_allreduce_async",
        "grouped_allreduce_async_",
        "grouped_reducescatter",
        "grouped_reducescatter_async",
        "join",
        "metrics",
        "poll",
        "print_once",
        "reducescatter",
        "reducescatter_async",
        "set_seed",
        "sparse_allreduce_async",
        "synchronize",
    ],
    "hvd_cluster.torch.elastic": [
        *("ElasticSampler", "GlobalBatches", "ObjectState", "State", "TorchState", "drain", "run"),
    ],
    "hvd_cluster.torch.elastic.state": [
        "ModelStateHandler",
        "OptimizerStateHandler",
        "SamplerStateHandler",
        "StateHandler",
        "TorchState",
        "get_handler_registry",
        "set_handler_registry",
    ],
}


@pytest.mark.leaves("environment")  # TensorFlow sets variables when it is imported
@pytest.mark.parametrize("name", SURFACE)
def test_the_public_surface_is_a_decision(name):
    if name == "hvd_cluster.mxnet" and find_spec("mxnet") is None:
        pytest.skip("there is no MXNet: make test-mxnet has it, and compares these names")
    for library, prefix in {
        "torch": "hvd_cluster.torch",
        "keras": "hvd_cluster.keras",
        "lightning": "hvd_cluster.lightning",
        "pytorch_lightning": "hvd_cluster.lightning.pytorch_lightning",
        "tensorflow": "hvd_cluster.tensorflow",
        "pyspark": "hvd_cluster.spark",
    }.items():
        if name.startswith(prefix):
            pytest.importorskip(library)
    module = importlib.import_module(name)
    assert sorted(module.__all__) == sorted(SURFACE[name])
    assert all(hasattr(module, member) for member in module.__all__)
