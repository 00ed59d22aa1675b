"""Becomes a command that ends with the process that has started it.

python -m zbmd.actors.process_pool.lifetime_link PARENT COMMAND [ARGUMENT …]
"""

from __future__ import annotations

import os
import sys

from zbmd.transport.host.process import end_with_parent


def main() -> None:
    """Ask the kernel for a SIGKILL at the parent's end, which outlasts `execvp`, and become the command."""
    end_with_parent(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main()
