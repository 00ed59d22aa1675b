"""`python -m zbmd` runs the `zbmd` command."""

from __future__ import annotations

from zbmd.tools.entry.scripts import zbmd

if __name__ == "__main__":
    raise SystemExit(zbmd())
