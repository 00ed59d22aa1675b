"""Operators, layers, optimizer and state of a model as supervised actors.

A step calls them directly: the compute thread passes an actor its message by reference, without the event
loop, but under the actor's own rules (see `ActorSlot.call`). An actor that fails is restarted by its
supervisor, and the message is handled again. Imports `model`, `optim`, `step` and what they import. Begin
with `slot`, then `model_actors`.
"""
