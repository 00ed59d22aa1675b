"""Run a command in a virtual machine that has two RDMA devices in software, joined by a cable.

    python -m zbmd.tools.lab.rdma_vm [--timeout TIME] [--accelerator tcg|kvm] [--verbose] COMMAND ...

The machine sees this machine's files, read-only; what the command writes is gone with the machine. Its exit
code is the command's; 125 if the machine itself failed. What it needs of Debian's packages is downloaded,
unpacked and kept in the user's cache; nothing but QEMU has to be installed, and no right is needed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Final

from zbmd.tools.cli.options import script_parser
from zbmd.tools.lab.rdma_vm.image import image, require_programs
from zbmd.tools.lab.rdma_vm.machine import Run, run
from zbmd.transport.clock.deadlines import parse_duration
from zbmd.transport.errors import ZbmdError

FAILED: Final = 125
TIMEOUT: Final = "300s"


def main(argv: list[str] | None = None) -> int:
    """The command; its exit code."""
    parser = script_parser("lab.rdma_vm", __doc__)
    parser.add_argument("--timeout", default=TIMEOUT, help=f"of the whole machine (default: {TIMEOUT})")
    parser.add_argument(
        "--accelerator", choices=("tcg", "kvm"), default="tcg", help="default: tcg, which every machine has"
    )
    parser.add_argument("--verbose", action="store_true", help="show the machine's console on stderr")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND ...")
    arguments = parser.parse_args(argv)
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("no command to run in the machine")
    # So that what was started is ended on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        require_programs()
        with image() as made:
            what = Run(
                command=command,
                folder=Path.cwd(),
                environment=os.environ,
                timeout_s=parse_duration(arguments.timeout),
                accelerator=arguments.accelerator,
                console=sys.stderr.buffer if arguments.verbose else None,
            )
            return run(made, what, sys.stdout.buffer)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except ZbmdError as error:
        print(f"rdma-vm: {error}", file=sys.stderr)
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
