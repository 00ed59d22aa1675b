"""The ranks of one host: their processes, their links to the host, and what the host reports of them.

`processes` forks, signals and reaps, over the template of `process`; `links` listens for the ranks and
watches for deaths; `events` are the reports to the owner of a run. Nothing here decides: that is
`actors.cluster.jobs`, for a job on this host alone as for one on several. May import `rank` and everything
below it. Begin with `processes`.
"""
