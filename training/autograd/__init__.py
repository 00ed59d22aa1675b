"""The package `autograd` of `zbmd.training`."""
