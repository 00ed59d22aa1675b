"""The package `sweep` of `zbmd.tools.chaos`."""
