"""What a save and a load cost, by the number of ranks: counted in one process with the real code of rank 0. The page
docs/guides/scale.md shows this table, and `test_checkpoint_scale.py` fails where a count or its law changes.

The model has 4 of the 80 blocks of a Llama of 70 billion parameters (39 tensors), in training with AdamW at stage 3.
"""

RANKS = (64, 1024, 4096)

BUDGET = {
    "first save: most bytes sent and received by a rank above 0": ("ranks + chunks", (91824, 219829, 604165)),
    "first save: bytes received by rank 0": ("ranks + chunks", (84844, 167192, 414388)),
    "first save: bytes sent by rank 0": ("ranks", (8092, 53888, 187643)),
    "next save: most bytes sent and received by a rank above 0": ("ranks + chunks", (81284, 125906, 252306)),
    "next save: bytes received by rank 0": ("ranks + chunks", (80044, 122397, 244971)),
    "next save: bytes received by a rank with none below it": ("constant", (198, 198, 198)),
    "regions that rank 0 keeps": ("ranks x units + tensors", (480, 7200, 28704)),
    "Python calls of rank 0 to plan": ("ranks x units + tensors", (8555, 96856, 379476)),
    "Python calls of rank 0 to take the plan of the last save": ("ranks", (1171, 18447, 73741)),
    "Python calls of rank 0 to put the hashes together": ("ranks + chunks", (60025, 100193, 229217)),
    "files": ("sets of writers", (6, 6, 6)),
    "most opens and flushes of a rank": ("constant", (5, 5, 6)),
    "opens and flushes of all ranks": ("ranks", (268, 4208, 16812)),
    "load: most bytes sent and received by a rank above 0": ("tensors x log(ranks)", (3193, 5481, 6318)),
    "load: bytes received by rank 0": ("tensors x log(ranks)", (3436, 5700, 6518)),
    "load: regions that rank 0 compares": ("constant", (156, 156, 156)),
    "snapshot, a node is new: most bytes sent and received by a rank above 0": (
        "ranks + chunks",
        (222894, 374828, 885670),
    ),
    "snapshot, a node is new: bytes received by rank 0": ("ranks", (3694, 15922, 39787)),
    "snapshot, a node is new: bytes sent by rank 0": ("ranks + chunks", (110266, 189550, 449310)),
    "snapshot, 8 ranks less: most bytes sent and received by a rank above 0": ("ranks", (24360, 31204, 72306)),
    "snapshot, 8 ranks less: bytes received by rank 0": ("ranks", (4271, 21378, 58872)),
    "snapshot, 8 ranks less: bytes sent by rank 0": ("bytes that travel / 16 MiB + ranks", (24523, 10453, 28820)),
    "mending a byte: most bytes sent and received by a rank above 0": ("ranks", (11934, 36526, 91735)),
    "mending a byte: most bytes sent and received by a rank with none below it": ("constant", (917, 909, 905)),
    "mending a byte: bytes received by rank 0": ("ranks", (7978, 30742, 79880)),
    "mending a byte: bytes sent by rank 0": ("ranks", (3787, 6400, 11455)),
    "mending a file of a node: most bytes sent and received by a rank above 0": (
        "damage + ranks",
        (75642, 42355, 107644),
    ),
    "mending a file of a node: most bytes sent and received by a rank with none below it": (
        "constant",
        (3152, 1461, 1497),
    ),
    "mending a file of a node: bytes received by rank 0": ("damage + ranks", (31289, 36792, 86063)),
    "mending a file of a node: bytes sent by rank 0": ("damage + ranks", (12578, 12647, 24983)),
}


def rows() -> list[str]:
    """The table of the page, line by line."""
    head = ["| count | law | " + " | ".join(f"{ranks:,} ranks" for ranks in RANKS) + " |", "|---|---|---|---|---|"]
    return head + [
        f"| {name} | {law} | " + " | ".join(f"{value:,}" for value in values) + " |"
        for name, (law, values) in BUDGET.items()
    ]
