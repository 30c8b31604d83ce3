"""How the processes that tests start begin: see ``sitecustomize`` in this folder, and PATH for their PYTHONPATH."""

import os
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PATH = os.pathsep.join([str(FOLDER), str(ROOT)])
