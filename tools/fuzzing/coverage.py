"""Fuzzing led by coverage: atheris (libFuzzer) over the same targets, in a process of its own.

`python -m zbmd.tools.fuzzing.coverage SEED SECONDS DIRECTORY TARGET…`. libFuzzer ends the process by itself.
An input's first byte picks the target. A finding is left in DIRECTORY as `atheris-…`, with that byte.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
from pathlib import Path
from typing import Any, NoReturn

ARTIFACT_PREFIX = "atheris-"
RSS_MIB_MAX = 2048
SEEDS_PER_TARGET_MAX = 64


def is_installed() -> bool:
    """Whether there is an atheris for this interpreter (the `fuzz` extra)."""
    return importlib.util.find_spec("atheris") is not None


def main(arguments: list[str]) -> NoReturn:
    """Fuzz until the time is up or something is found."""
    seed, seconds, directory, *names = arguments
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["zbmd"], enable_loader_override=False):
        registry = importlib.import_module("zbmd.tools.fuzzing.registry")
    from zbmd.tools.fuzzing.mutate import mutate
    from zbmd.tools.fuzzing.target import INPUT_BYTES_MAX, INPUT_S_MAX, refuses
    from zbmd.tools.sim.scenarios import quietly

    targets = [registry.TARGETS[name] for name in names]
    corpora = [target.seeds() for target in targets]
    corpus = Path(directory) / "corpus"
    corpus.mkdir()
    for number, seeds in enumerate(corpora):
        for index, data in enumerate(seeds[:SEEDS_PER_TARGET_MAX]):
            (corpus / f"{number}-{index}").write_bytes(bytes([number]) + data)

    def run(data: bytes) -> None:
        if data:
            refuses(targets[data[0] % len(targets)], data[1:])

    def change(data: bytes, size_max: int, seed: int) -> bytes:
        """Every other time by the targets' own mutations, which know what the inputs look like."""
        if seed % 2 or not data:
            return bytes(atheris.Mutate(data, size_max))
        number = data[0] % len(targets)
        rng = random.Random(seed)
        return (bytes([number]) + mutate(rng, (data[1:], *corpora[number])))[:size_max]

    options = {
        "max_total_time": seconds,
        "seed": seed,
        "max_len": INPUT_BYTES_MAX,
        "timeout": int(INPUT_S_MAX),
        "rss_limit_mb": RSS_MIB_MAX,
        "artifact_prefix": Path(directory) / ARTIFACT_PREFIX,
        "print_final_stats": 1,
    }
    with quietly():
        command = [sys.argv[0], *(f"-{key}={value}" for key, value in options.items()), str(corpus)]
        atheris.Setup(command, run, custom_mutator=change)
        atheris.Fuzz()
    raise SystemExit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
