"""Runs at the start of every Python that has this folder on PYTHONPATH, which the tests set: it starts and ends faster.

``import tensorflow`` takes half as long without the packages that it and Keras import only because they are there;
others have such imports, too. Half of the time that torch takes until the first step goes to its compiler, and a fifth
of an import of Lightning to ``scipy.signal``: their code runs when somebody uses them.
Frameworks make a million objects that stay, so that full collections of garbage find nothing and take long: they are
rare, and none comes at the end of the interpreter, where it takes a quarter of the processor time of a short script.
Young objects are collected as often as always. A process with the variable WHOLE_END ends as those of users do.
"""

import atexit
import gc
import os
import sys
import threading
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

# A package -> the modules, with all below them, that do without it.
HIDDEN = {
    "sklearn": ("keras",),
    "matplotlib": ("keras",),
    "IPython": ("keras", "pyspark"),
    "pandas": ("keras", "sklearn"),
    "jax": ("tensorflow", "keras.src.callbacks"),
}
COMPILER = "torch._dynamo"
USUAL = gc.get_threshold()
RARELY = 1000
WHOLE_END = "HVD_TESTS_WHOLE_END"


class Hider:
    """A finder that comes before the others."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if fullname not in HIDDEN:
            return
        importer = _importer()
        if any(f"{importer}.".startswith(f"{above}.") for above in HIDDEN[fullname]):
            raise ModuleNotFoundError(f"{__file__} hides {fullname} from {importer}", name=fullname)


class LateFinder:
    """A finder of the modules of LATE, whose code runs when somebody uses them or imports a module below."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if isinstance(above := sys.modules.get(fullname.rpartition(".")[0]), Deferred):
            above.run()
            there = sys.modules.get(fullname)
            return there and ModuleSpec(fullname, LoadedBefore(there, there.__spec__))
        spec = PathFinder.find_spec(fullname, path) if fullname in LATE else None
        if spec and spec.loader:
            spec.loader = LateLoader(spec.loader)
        return spec


class LateLoader:
    """A loader that leaves the code of the module to its first use."""

    def __init__(self, real):
        self.real = real

    def create_module(self, spec):
        return self.real.create_module(spec)

    def exec_module(self, module):
        vars(module).update(LATE[module.__name__])
        module.__class__ = Deferred


class LoadedBefore:
    """A loader of a module that the code of the module above has imported."""

    def __init__(self, module, spec):
        self.module = module
        self.spec = spec

    def create_module(self, spec):
        return self.module

    def exec_module(self, module):
        module.__spec__ = self.spec


RUNNING = threading.RLock()  # held by the thread that runs the code of a late module, as long as that takes


class Deferred(ModuleType):
    """A module as long as its code has not run. It has what is asked for where nobody uses it: see LATE."""

    def __getattr__(self, name):
        self.run()
        return getattr(self, name)

    def run(self):
        with RUNNING:
            if isinstance(self, Deferred):
                self.__class__ = ModuleType
                for each in LATE[self.__name__]:
                    delattr(self, each)
                self.__spec__.loader = self.__loader__ = self.__spec__.loader.real
                self.__loader__.exec_module(self)


def _nothing():
    """There is no graph to break."""


def _disable(function=None, *arguments, **options):
    """As that of the compiler from its import on: until then there is nothing to disable."""
    if function is None:
        return lambda function: _disable(function, *arguments, **options)
    compiler, disabled = sys.modules[COMPILER], None

    def call(*args, **kwargs):
        nonlocal disabled
        if disabled is None and not isinstance(compiler, Deferred):
            disabled = compiler.disable(function, *arguments, **options)
        return (disabled or function)(*args, **kwargs)

    return call


class CompiledModule(type):
    """The class of a stand-in for ``OptimizedModule``, of which Lightning asks whether a module is one."""

    def __instancecheck__(cls, instance):
        compiler = sys.modules[COMPILER]
        return not isinstance(compiler, Deferred) and isinstance(instance, compiler.OptimizedModule)


# A module -> what it has before its code has run. An optimizer of torch calls two functions of the compiler in each
# step; torchmetrics looks whether scipy.signal has the name of a window that left it.
LATE = {
    COMPILER: {
        "graph_break": _nothing,
        "disable": _disable,
        "OptimizedModule": CompiledModule("OptimizedModule", (), {}),
    },
    "scipy.signal": {"hamming": None},
}


def _importer():
    """The name of the module whose import statement runs."""
    frame = sys._getframe(2)
    while frame and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame else ""


sys.meta_path[:0] = [Hider, LateFinder]
gc.set_threshold(*USUAL[:2], RARELY)
if WHOLE_END not in os.environ:
    atexit.register(gc.freeze)  # the first that is registered is the last that is called
