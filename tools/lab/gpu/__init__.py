"""The package `gpu` of `zbmd.tools.lab`."""
