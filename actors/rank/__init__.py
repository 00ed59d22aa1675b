"""A rank's membership in its job: `member.join` returns the `Worker` through which it reaches its peers.

Also holds the contracts between a rank and its host (`host_contracts`) and what a launcher tells a rank
(`environment`). May import the actor core, replay and hang detection, and never its host's supervisor, which
runs in another process. Begin with `member`, then `links` (when may a view be entered?) and `remote_links`
(members on other hosts).
"""
