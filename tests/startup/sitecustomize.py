"""Runs at the start of every Python that has this folder on PYTHONPATH, which the tests set: it starts and ends faster.

``import tensorflow`` takes half as long without the packages that it and Keras import only because they are there;
others have such imports, too. Half of the time that torch takes until the first step goes to its compiler, which is
imported where something is compiled.
Frameworks make a million objects that stay, so that full collections of garbage find nothing and take long: they are
rare, and none comes at the end of the interpreter, where it takes a quarter of the processor time of a short script.
Young objects are collected as often as always. A process with the variable WHOLE_END ends as those of users do.
"""

import atexit
import gc
import os
import sys
import threading
from importlib.machinery import PathFinder
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


class CompilerFinder:
    """A finder of the compiler of torch, which runs when somebody uses it."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        spec = PathFinder.find_spec(fullname, path) if fullname == COMPILER else None
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
        del module.__path__  # an import of a module below is a use
        vars(module).update(graph_break=_nothing, disable=_disable)
        module.__class__ = Deferred


RUNNING = threading.RLock()  # held by the thread that runs the code of the compiler, as long as that takes


class Deferred(ModuleType):
    """The compiler as long as its code has not run. An optimizer calls two of its functions in each step."""

    def __getattr__(self, name):
        with RUNNING:
            if isinstance(self, Deferred):
                self.__class__ = ModuleType
                del self.graph_break, self.disable
                spec = self.__spec__
                spec.loader = self.__loader__ = spec.loader.real
                self.__path__ = spec.submodule_search_locations
                spec.loader.exec_module(self)
        return getattr(self, name)


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


def _importer():
    """The name of the module whose import statement runs."""
    frame = sys._getframe(2)
    while frame and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame else ""


sys.meta_path[:0] = [Hider, CompilerFinder]
gc.set_threshold(*USUAL[:2], RARELY)
if WHOLE_END not in os.environ:
    atexit.register(gc.freeze)  # the first that is registered is the last that is called
