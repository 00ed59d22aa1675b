"""Runs the Python fragments of one page, one after the other in one namespace, on zbmd's event loop.

`python page_session.py FRAGMENTS.json`: a list of [place, source]. Fragments may `await` anywhere.
"""

from __future__ import annotations

import ast
import asyncio
import json
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import zbmd


async def run_all(fragments: list[tuple[str, str]], namespace: dict[str, Any]) -> None:
    for place, source in fragments:
        linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)
        code = compile(source, place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, namespace)  # noqa: S307 -- our own pages
        if asyncio.iscoroutine(result):
            await result


if __name__ == "__main__":
    page = ModuleType("page")
    sys.modules["page"] = page
    zbmd.run(run_all(json.loads(Path(sys.argv[1]).read_text()), vars(page)))
