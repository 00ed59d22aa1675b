"""The package `runs` of `zbmd.tools`."""
