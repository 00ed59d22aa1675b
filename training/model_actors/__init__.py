"""Operators, layers, optimizer and state of a model as supervised actors.

A step calls them directly: the compute thread hands an actor its message by reference, without the loop, and
under the actor's own rules (see `Seat.call`). What fails is restarted by its supervisor, and done again.
"""
