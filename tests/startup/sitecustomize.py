"""Runs at the start of every Python that has this folder on PYTHONPATH, which the tests set: it starts and ends faster.

``import tensorflow`` takes half as long without the packages that it and Keras import only because they are there;
others have such imports, too.
Frameworks make a million objects that stay, so that full collections of garbage find nothing and take long: they are
rare, and none comes at the end of the interpreter, where it takes a quarter of the processor time of a short script.
Young objects are collected as often as always. A process with the variable WHOLE_END ends as those of users do.
"""

import atexit
import gc
import os
import sys

# A package -> the modules, with all below them, that do without it.
HIDDEN = {
    "sklearn": ("keras",),
    "matplotlib": ("keras",),
    "IPython": ("keras", "pyspark"),
    "pandas": ("keras", "sklearn"),
    "jax": ("tensorflow", "keras.src.callbacks"),
}
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


def _importer():
    """The name of the module whose import statement runs."""
    frame = sys._getframe(2)
    while frame and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame else ""


sys.meta_path.insert(0, Hider)
gc.set_threshold(*USUAL[:2], RARELY)
if WHOLE_END not in os.environ:
    atexit.register(gc.freeze)  # the first that is registered is the last that is called
