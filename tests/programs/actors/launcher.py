"""A launcher of one rank whose template is a fork of it: launcher.py SCRIPT."""

from __future__ import annotations

import os
import sys

from zbmd.actors.process.early_template import fork_template
from zbmd.tools.cli import process

launcher_pid = os.getpid()


def main() -> int:
    """Run the script, and say once that the launcher has ended: a fork must not come this far."""
    import uvloop

    from zbmd.actors.cluster.jobs.host import Host, HostConfig
    from zbmd.actors.cluster.jobs.reports import RunResult

    template = fork_template(["zbmd.actors.rank.member"], {**os.environ, "GIVEN": "yes"})
    assert template is not None
    os.environ["GIVEN"] = "too late"
    config = HostConfig(target=sys.argv[1], world_size=1, max_restarts=0, arena_bytes=1 << 20)

    async def run() -> RunResult:
        return await Host(config, template=template).run()

    try:
        print(uvloop.run(run()).reason)
    except Exception:  # noqa: BLE001 (whatever it is, it came to the launcher)
        print("an error of the script was taken for one of the launcher")
    finally:
        print("end of", os.getpid() == launcher_pid)
    return 0


sys.exit(process.run(main))
