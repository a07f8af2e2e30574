"""Checkpoints of other programs: read without running code in them, and written as a checkpoint of dsx.

from dsx_checkpoint.foreign import read_foreign
source = read_foreign("deepspeed_run")        # a `Source`; tensors are read when they are asked for
write_source(source, "ckpt", "imported")

unpickling.py     the one unpickler, with an explicit list of what it makes
limits.py         what a file may ask for: no more memory than it has bytes
source.py         what a checkpoint holds, as names and functions that give tensors; written as one of dsx
deepspeed.py      ZeRO 0 to 3, pipelines, universal checkpoints
torch_dcp.py      torch.distributed.checkpoint (FSDP)
plain.py          one file with a state dict, or safetensors
recognising.py    which of them a folder is
"""
