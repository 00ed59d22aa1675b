"""Hosts of one job measured together before it begins: the links between them, and their speeds.

`survey` is the machine that chooses pairs and names bad hosts; `links` measures a pair; `driver` sends what
the machine wants to the nodes of a cluster. Imports actors and transport. Begin with `survey`.
"""
