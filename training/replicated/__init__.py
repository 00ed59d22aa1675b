"""The data-parallel job: every rank holds the whole state, and steps are committed by a vote.

`job` runs it under a launcher; `workload` is one rank's part of a step; `plain` is the same in one process,
the reference for bits and time; `scenario` simulates it with failures. Imports `model_actors`, `profiler`,
`run` and below. Begin with `plain`.
"""
