"""A rank that stops in a debugger. Arguments: how, one time after the other."""

from __future__ import annotations

import os
import pdb
import sys

rank = os.environ["RANK"]
for how in sys.argv[1:]:
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
