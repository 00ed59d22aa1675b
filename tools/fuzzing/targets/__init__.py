"""The package `targets` of `zbmd.tools.fuzzing`."""
