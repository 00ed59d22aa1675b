"""Programs that tests start as ranks, scripts or peers; each file is run by its path, `PROGRAMS / "…"`."""

from pathlib import Path

PROGRAMS = Path(__file__).parent
