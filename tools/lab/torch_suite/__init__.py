"""PyTorch's own tests of distributed backends, over gloo and over zbmd, and a table of what passes.

`cases` loads the tests that are installed with torch, `rank` is the program of a rank that runs them, `jobs`
starts ranks and collects what they report, `__main__` is the command. Begin with `__main__`.
"""
