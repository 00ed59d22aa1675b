"""The package `transport` of `zbmd.tools.bench`."""
