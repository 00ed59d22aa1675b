"""Run the corpus of injected faults, and print its confusion table.

    python -m zbmd.tools.lab.faults --out faults --seeds 7
    python -m zbmd.tools.lab.faults --out faults --only killed,lock

A case that has a result in `--out` is not run again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from zbmd.tools.cli.options import script_parser
from zbmd.transport.host.threads import default_to_one_thread

RIGHT_MIN = 0.95


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; exit code 1 if less than 95 % of the root causes were right."""
    parser = script_parser("zbmd.tools.lab.faults", __doc__)
    parser.add_argument("--out", type=Path, default=Path("faults"), help="directory (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=7, help="of each kind (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="of the seeds (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="KINDS", help="with commas between them (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep directories of cases that were right, too")
    parser.add_argument("--again", action="store_true", help="run nothing: diagnose kept cases again")
    arguments = parser.parse_args(argv)
    default_to_one_thread()
    from zbmd.tools.lab.faults.corpus import judge_again, kinds_here, read_results, run_corpus, table

    kinds, seeds = (
        kinds_here(tuple(filter(None, arguments.only.split(",")))),
        range(arguments.first, arguments.first + arguments.seeds),
    )
    if arguments.again:
        path = judge_again(arguments.out)
    else:
        path = run_corpus(arguments.out, kinds, seeds, jobs=arguments.jobs, keep=arguments.keep)
    results = read_results(path)
    print("\n".join(table(results)))
    return 0 if sum(one.right for one in results) >= RIGHT_MIN * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
