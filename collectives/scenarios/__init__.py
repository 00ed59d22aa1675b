"""Simulated scenarios of collectives: plain operations, step commit, repair and sub-groups, with kills.

`commit_world` is the simulated world and its kill plans; `collectives`, `commit`, `repair` and `subgroups`
are scenarios for `zbmd sim`. Imports all of collectives and `zbmd.transport.sim`. Begin with `commit`.
"""
