"""The package `training` of `zbmd.tools.bench`."""
