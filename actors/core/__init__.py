"""The core of actors: cells, mailboxes, references, links between systems, and the wire.

It imports `zbmd.transport`, `zbmd.actors.contracts` and `zbmd.actors.errors`, and knows no service: names,
supervisors, upgrades, routes and the loop watch plug in by `services`. The code that runs at each message is
compiled, in `native`. Begin reading at `actor.py` (what authors write), then `cell.py` (what runs it),
`system.py` and `peer.py`.
"""
