"""The package `collectives` of `zbmd.tools.bench`."""
