"""The package `programs` of `zbmd.tools.chaos`."""
