"""Checkpoints of other programs: folders of `torch.distributed.checkpoint` and of Hugging Face.

`tensors` describes the content of a checkpoint of ours; `convert` goes from one format to another; `dcp`
reads and writes PyTorch's folders (it needs torch), `safetensors_folder` Hugging Face's. Begin with
`convert`.
"""
