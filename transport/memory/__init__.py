"""The package `memory` of `zbmd.transport`."""
