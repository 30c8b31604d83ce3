"""Runs examples one after another in one driver: spark_examples.py EXAMPLES FOLDER '{"name.py": ["--option"]}'.

Each example has a Spark application of its own, in one JVM. Its exit code and its output go into files of the folder.
"""

import json
import os
import runpy
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def output_into(path):
    """Write all output of this process into ``path`` with .out and .error, also that of programs that it starts."""
    kept = [os.dup(number) for number in (1, 2)]
    for number, kind in ((1, "out"), (2, "error")):
        file = os.open(f"{path}.{kind}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, file in enumerate(kept, 1):
            os.dup2(file, number)
            os.close(file)


def exit_code(script, arguments):
    """Run the script in this process. An exception in it keeps no other script from running."""
    sys.argv = [str(script), *arguments]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if not isinstance(end.code, str):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except Exception:  # noqa: BLE001  its test shows it
        traceback.print_exc()
        return 1
    return 0


def main():
    examples, folder, scripts = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    sys.path.insert(0, str(examples))
    for name, arguments in scripts.items():
        with output_into(folder / name):
            code = exit_code(examples / name, arguments)
        (folder / f"{name}.code").write_text(str(code))


if __name__ == "__main__":
    main()
