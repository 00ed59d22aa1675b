"""The package `membership` of `zbmd.actors.cluster`."""
