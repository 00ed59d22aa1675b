"""Hosts of one job measured together before they get ranks: the links between them, and their speeds.

`gate` is the machine that decides when, and which hosts are fit; `survey` chooses pairs and names bad hosts;
`host` and `links` measure; `driver` sends what the gate wants to the nodes of a cluster. Imports actors,
transport and the doctor's probes. Begin with `gate`.
"""
