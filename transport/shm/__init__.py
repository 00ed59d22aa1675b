"""The package `shm` of `zbmd.transport`."""
