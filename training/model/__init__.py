"""The GPT model: forward and backward pass, generation, and files of weights.

`gpt` is the model as a function of flat parameters, `tensor_parallel` the part of it that a rank along `tp`
computes; `generate` samples with a key-value cache; `weights` reads and writes safetensors. Imports `ops`,
`autograd`, `config`, `files` and collectives. Begin with `gpt`.
"""
