"""What a save costs, by the number of ranks: counted in one process with the real code of rank 0. The page
docs/guides/scale.md shows this table, and `test_checkpoint_scale.py` fails where a count or its law changes.

The model has 4 of the 80 blocks of a Llama of 70 billion parameters (39 tensors), in training with AdamW at stage 3.
"""

RANKS = (64, 1024, 4096)

BUDGET = {
    "first save: most bytes sent and received by a rank above 0": (
        "the ranks below it in the tree",
        (71820, 72499, 1748015),
    ),
    "first save: bytes received by rank 0": ("ranks + tensors", (50415, 824949, 3313799)),
    "next save: most bytes sent and received by a rank above 0": (
        "the ranks below it in the tree",
        (157747, 58280, 1777348),
    ),
    "next save: bytes received by rank 0": ("ranks + chunks", (151997, 849212, 3528508)),
    "next save: bytes received by a rank with none below it": ("constant", (175, 175, 175)),
    "regions that rank 0 keeps": ("ranks x units + tensors", (480, 7200, 28704)),
    "Python calls of rank 0 to plan": ("ranks x units + tensors", (37044, 443124, 1742580)),
    "Python calls of rank 0 to take the plan of the last save": ("ranks", (990, 15390, 61470)),
    "Python calls of rank 0 to put the hashes together": ("regions + chunks", (98005, 374485, 1259221)),
    "files": ("sets of writers", (6, 6, 6)),
    "most opens and flushes of a rank": ("constant", (5, 5, 6)),
    "opens and flushes of all ranks": ("ranks", (268, 4208, 16812)),
}


def rows() -> list[str]:
    """The table of the page, line by line."""
    head = ["| count | law | " + " | ".join(f"{ranks:,} ranks" for ranks in RANKS) + " |", "|---|---|---|---|---|"]
    return head + [
        f"| {name} | {law} | " + " | ".join(f"{value:,}" for value in values) + " |"
        for name, (law, values) in BUDGET.items()
    ]
