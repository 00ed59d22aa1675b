"""Prints of each Parquet file of a folder: its name, its rows, and the sum of `wall_ns`."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

parquet: Any = importlib.import_module("pyarrow.parquet")
for path in sorted(Path(sys.argv[1]).iterdir()):
    table = parquet.read_table(path)
    walls = sum(table["wall_ns"].to_pylist()) if "wall_ns" in table.column_names else 0
    print(path.stem, table.num_rows, walls)
