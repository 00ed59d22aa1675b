"""A rank that registers a callback for its script's end, and ends: script_end.py raises|returns|CODE."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from zbmd.actors.process.exit import at_script_end


def ended(failed: bool) -> None:
    with ThreadPoolExecutor(1) as executor:
        print("failed", executor.submit(lambda: failed).result())


at_script_end(ended)
match sys.argv[1]:
    case "raises":
        raise ZeroDivisionError
    case "returns":
        pass
    case code:
        raise SystemExit(int(code))
