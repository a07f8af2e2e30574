"""Checkpoints where each node has a disk of its own and no file system is shared (`checkpoint.use_node_local_storage`).

    topology.py      which ranks share a disk
    transfers.py     bytes of files from node to node
    saving.py        each node writes what its ranks hold, and the next node gets a copy of what no other has
    finding.py       which saves the disks have parts of
    loading.py       finds a checkpoint over all disks, and brings each node what its ranks need and it does not have
    copies.py        hashes of what lies in parts of files
    repairing.py     damaged bytes are written anew from a copy
    disks.py         all of it as `plan_save` and `prepare_load` want them
    joining.py       one checkpoint from the folders of the nodes, without a job

Each node's folder of a tag has the same index and the same files at full size. Only some of their bytes are there;
`node.json` says which (`node_part.py`, `spans.py`). Nothing depends on which node is which number, or on how many there
are: a load at another number of nodes, or after the loss of one, reads what it needs from wherever it lies.
"""
