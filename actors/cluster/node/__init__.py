"""The package `node` of `zbmd.actors.cluster`."""
