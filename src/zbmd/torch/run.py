"""`python -m zbmd.torch.run`: a rank of torchrun, srun or mpirun that is replaced in place when it dies.

See docs/GUIDE_TORCH.md. PyTorch is not imported in this process, which only supervises: see `zbmd.torch`.
"""

from __future__ import annotations

import importlib
import sys

import zbmd
from zbmd.tools.cli.process import ended_by_ctrl_c, run
from zbmd.transport.host.threads import default_to_one_thread


def main() -> int:
    """Run the command."""
    default_to_one_thread()
    # The ranks are forked from here, and import it as if nobody had.
    if sys.modules.pop("zbmd.torch", None) is not None:
        delattr(zbmd, "torch")
    with ended_by_ctrl_c():
        command = importlib.import_module("zbmd.tools.node.guard.command").main
    return run(command)


if __name__ == "__main__":
    sys.exit(main())
