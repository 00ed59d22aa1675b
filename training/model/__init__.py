"""The GPT model: forward and backward pass, generation, and files of weights.

`gpt` is the model as a function of flat parameters; `generate` samples with a key-value cache; `weights` and
`hugging_face` read and write safetensors. Imports `ops`, `autograd`, `config` and `files`. Begin with `gpt`.
"""
