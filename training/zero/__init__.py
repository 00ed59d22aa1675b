"""ZeRO: optimizer state, gradients and weights shared out over ranks. See `layout`, `machine` and `rank`."""
