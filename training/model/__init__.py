"""The GPT model: forward and backward pass, generation, and files of weights.

`gpt` is the model as a function of flat parameters, `tensor_parallel` the part of it that a rank along `tp`
computes, by the slices of `tensor_shards`; `generate` samples with a key-value cache; `weights` and
`hugging_face` read and write safetensors. Imports `ops`, `autograd`, `config`, `files` and collectives. Begin
with `gpt`.
"""
