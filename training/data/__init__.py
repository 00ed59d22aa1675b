"""Training text: corpora of bytes or tokens in memory-mapped files, and their tokenizers.

`corpus` joins files and divides them into windows; `token_corpus` does so with BPE tokens from `tokenizers`.
Imports only `autograd`, `config` and `files`. Begin with `corpus`.
"""
