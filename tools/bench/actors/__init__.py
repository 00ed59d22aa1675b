"""The package `actors` of `zbmd.tools.bench`."""
