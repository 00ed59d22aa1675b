"""A script that is a job of its own and logs at two levels: logs_twice.py zbmd|asyncio."""

from __future__ import annotations

import asyncio
import sys

import structlog

import zbmd


async def main() -> None:
    async with zbmd.join():
        structlog.get_logger().debug("of no interest")
        structlog.get_logger().warning("worth a look")


{"zbmd": zbmd.run, "asyncio": asyncio.run}[sys.argv[1]](main())
