"""Runs at the start of every Python that has this folder on PYTHONPATH, which the tests set: it starts faster.

``import tensorflow`` takes half as long without the packages that it and Keras import only because they are there.
Frameworks make a million objects that stay, so that full collections of garbage find nothing and take long: they are
rare. Young objects are collected as often as always.
"""

import gc
import sys

# A package -> the importer that does without it.
HIDDEN = {"sklearn": "keras", "matplotlib": "keras", "jax": "tensorflow"}
USUAL = gc.get_threshold()
RARELY = 1000


class Hider:
    """A finder that comes before the others."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if fullname in HIDDEN and _importer() == HIDDEN[fullname]:
            raise ModuleNotFoundError(f"{__file__} hides {fullname} from {HIDDEN[fullname]}", name=fullname)


def _importer():
    """The first part of the name of the module whose import statement runs."""
    frame = sys._getframe(2)
    while frame and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").partition(".")[0] if frame else ""


sys.meta_path.insert(0, Hider)
gc.set_threshold(*USUAL[:2], RARELY)
