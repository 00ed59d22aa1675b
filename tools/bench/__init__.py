"""The package `bench` of `zbmd.tools`."""
