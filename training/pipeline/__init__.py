"""Pipeline parallelism: schedules as programs, their proof and simulation, and the stages that run them.

`program` is the language, `schedules` makes programs, `verifier` proves and `simulate` times them; `stage` is
the sans-I/O machine, `rings` and `passes` drive it, `part` is what a stage holds. Imports `model`, `step`,
`profiler` and collectives. Begin with `program`.
"""
