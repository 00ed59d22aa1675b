"""A rank that stops in a debugger. Argument: how."""

from __future__ import annotations

import os
import pdb
import sys

rank, how = os.environ["RANK"], sys.argv[1]
if how == "set_trace":
    pdb.set_trace()
elif how == "post_mortem":
    try:
        assert not how
    except AssertionError:
        pdb.post_mortem()
else:
    breakpoint()
print("rank", rank, "went on", flush=True)
print("and", rank, "ends", flush=True)
