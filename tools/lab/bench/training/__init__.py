"""Benchmarks of training: the engine, ZeRO, overlap with the backward pass, steps beside PyTorch's."""
