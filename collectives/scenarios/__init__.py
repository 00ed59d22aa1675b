"""The package `scenarios` of `zbmd.collectives`."""
