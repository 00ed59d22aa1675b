"""Whole nodes in a simulated world: membership, actors, names, groups and changes of code, all at once.

What runs is what runs in production: `ClusterMachine` and `Detector` (over datagrams), `NodeActors` with its
`ActorSystem`, `Directory` and links, `Supervisor`, the machines of an upgrade and their actors. What is the
simulation's own: who does what when (`clients`), the nodes and the actors that report to it (`testbed`), and
what must hold (`ledgers`). `scenario` puts them together.
"""
