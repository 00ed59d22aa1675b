"""The supervisor of one job on one host: forks ranks, watches them, installs views, restarts what failed.

Every decision is made by `membership.MembershipMachine`; `supervisor.Host` is its driver over real processes
(`process`, `processes`) and links (`links`). May import `rank` and everything below it; the jobs of a cluster
(`actors.cluster.jobs`) use the same links and processes. Begin with `membership_events`, then `membership`.
"""
