"""Checkpoints if each node has its own disk and no file system is shared (`checkpoint.use_node_local_storage`).

    topology.py      which ranks share a disk
    transfers.py     bytes of files from node to node
    saving.py        each node writes the bytes of its ranks; bytes that no other node has are copied to the next node
    finding.py       the saves of which the disks have parts
    loading.py       finds a checkpoint over all disks, and sends each node the bytes that its ranks need and it lacks
    copies.py        hashes of parts of files
    repairing.py     damaged bytes are written again from a copy
    disks.py         all of this with the interface of `plan_save` and `prepare_load`
    joining.py       one checkpoint from the folders of the nodes, without a job

Each node's folder of a tag has the same index and the same files at full size. Only some of their bytes are there;
`node.json` says which (`node_part.py`, `spans.py`). The numbers of the nodes, and how many nodes there are, do not
matter: a load at another number of nodes, or after the loss of one, reads the bytes from any disk that has them.
"""
