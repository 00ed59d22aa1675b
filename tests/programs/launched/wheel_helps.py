"""Prints what each command of an installed `zbmd` answers to `--help`, as JSON. argv: the commands."""

from __future__ import annotations

import contextlib
import io
import json
import sys

from zbmd.tools.entry import zbmd
from zbmd.tools.node import cli

MAINS = {"zbmd": zbmd.main, "zbmd-node": cli.main}

answers: dict[str, str] = {}
for command in sys.argv[1:]:
    name, *words = command.split()
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        MAINS[name]([*words, "--help"])
    answers[command] = shown.getvalue()
print(json.dumps(answers))
