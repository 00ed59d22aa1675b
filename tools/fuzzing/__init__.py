"""Fuzzing: every place where bytes from outside are decoded, as a target that takes any bytes.

`registry.TARGETS` lists them, `registry.DECODERS` says of every module that decodes which of them reach it.
`python -m zbmd.tools.fuzzing` and the tests under `tests/` run the same targets.
"""
