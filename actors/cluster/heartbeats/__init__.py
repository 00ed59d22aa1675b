"""The package `heartbeats` of `zbmd.actors.cluster`."""
