"""Say what this machine lacks before anything is installed; run by the Makefile with the host's Python.

It must run on interpreters that are too old for the rest, so it keeps to the syntax of Python 3.6.
"""

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec

MINIMUM = (3, 11)


def missing() -> "list[str]":
    """Return a paragraph for each thing that is missing, saying how to get it; nothing if all is there."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info < MINIMUM:
        return [
            f"zbmd needs Python {MINIMUM[0]}.{MINIMUM[1]} or newer, and {sys.executable} is {version}. "
            "Install a newer one and name it: make PYTHON=/path/to/python3 …"
        ]
    found: list[str] = []
    short = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    # Debian splits both off the interpreter.
    if find_spec("venv") is None or find_spec("ensurepip") is None:
        found.append(
            f"{sys.executable} cannot make virtual environments. On Debian or Ubuntu: "
            f"apt-get install {short}-venv"
        )
    if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        found.append(
            f"{sys.executable} has no C headers (Python.h), which the compiled modules are built with. "
            f"On Debian or Ubuntu: apt-get install {short}-dev"
        )
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        found.append(
            f"there is no C compiler ({compiler}). On Debian or Ubuntu: apt-get install build-essential; "
            "elsewhere install gcc or clang, or name one in CC."
        )
    if sys.platform != "linux":
        found.append(f"zbmd runs on Linux (memfd, futexes, pidfds); this is {sys.platform}.")
    return found


if __name__ == "__main__":
    problems = missing()
    for problem in problems:
        sys.stderr.write(f"zbmd cannot be set up: {problem}\n")
    sys.exit(1 if problems else 0)
