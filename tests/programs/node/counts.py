"""A rank that counts; its first process is killed once that is written."""

from __future__ import annotations

import os
import signal

import zbmd


async def main() -> None:
    async with zbmd.join() as worker:
        zbmd.metrics.record_to("run")
        zbmd.metrics.counter("rows_read", "Rows read", labels={"source": "web"}).add(9 + worker.incarnation)
        zbmd.metrics.gauge("depth").set(worker.incarnation)
        fetch = zbmd.metrics.histogram("fetch_seconds", buckets=(0.5, 1))
        for value in (0.25, 1.0, 3.0):
            fetch.observe(value)
        zbmd.metrics.flush()
        if worker.incarnation == 1:
            os.kill(os.getpid(), signal.SIGKILL)


zbmd.run(main())
