"""Resilient loops that a framework owns: Hugging Face's `Trainer`, and Lightning's. See docs/GUIDE_TORCH.md.

`owned` repeats a step without its framework; each other module has the hooks of one framework, which is
imported there alone. They are reached by `zbmd.torch.transformers` and `zbmd.torch.lightning`.
"""
