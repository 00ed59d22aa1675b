"""Simulated scenarios of collectives: plain operations, repair and sub-groups, with kills.

`hosted_job` is a simulated job and its kill plans, `node` the node that runs it; `collectives`, `repair` and
`subgroups` are scenarios for `zbmd sim`. Imports all of collectives and `zbmd.transport.sim`. Begin with
`hosted_job`.
"""
