"""A run of `zbmd train` whose files may be so large from a version on; argv: version, bytes, its options."""

from __future__ import annotations

import resource
import sys

from support.jobs.by_words import train_by

first_limited, most_bytes, *arguments = sys.argv[1:]


def limit_files(version: int) -> None:
    if version == int(first_limited):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(most_bytes), int(most_bytes)))


train_by(arguments, limit_files)
