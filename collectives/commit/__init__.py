"""Step commit: ranks agree, by vote, that a transactional step has happened.

`machine` is the sans-I/O protocol, `events` its vocabulary, `wire` its contracts; `driver` runs a `Workload`
under it. Imports `group` and actors; training's data-parallel job is a workload. Begin with `machine`.
"""
