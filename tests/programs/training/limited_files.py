"""The training job, whose files may be so large from a version on; argv: version, bytes, the job's."""

from __future__ import annotations

import resource
import sys

import uvloop

from zbmd.training.__main__ import options_of, parser
from zbmd.training.replicated.job import run_job

first_limited, most_bytes, *arguments = sys.argv[1:]


def limit_files(version: int) -> None:
    if version == int(first_limited):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(most_bytes), int(most_bytes)))


result = uvloop.run(run_job(options_of(parser().parse_args(arguments)), before_step=limit_files))
