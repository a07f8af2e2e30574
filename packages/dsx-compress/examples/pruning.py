"""Pruning with recovery, as a table: half of the rows and heads of a BERT-like model, removed; and sparse weights.

    python packages/dsx-compress/examples/pruning.py                                    # some minutes on two cores
    python packages/dsx-compress/examples/pruning.py --steps 20 --recovery 20 --width 32 --seeds 1   # a look at it

The full model is trained on masked bytes, pruned, and trained on (with its old self as the teacher), while the full
model stays as it was. Rows and heads are then taken out: the model is a smaller ordinary one, and faster.
"""

import copy

import text_lab as lab
from dsx_compress import DistillationLoss, Teacher, compression_scheduler, init_compression, redundancy_clean


def rows_and_heads(ratio: float, heads: int, offset: int) -> dict:
    """Rows of the feed-forward networks and heads of the attention."""
    return {
        "row_pruning": {
            "shared_parameters": {"enabled": True, "schedule_offset": offset, "method": "topk"},
            "different_groups": {"rows": {
                "params": {"dense_ratio": ratio}, "modules": ["up"], "related_modules": [["down"]]}},
        },
        "head_pruning": {
            "shared_parameters": {"enabled": True, "schedule_offset": offset, "num_heads": heads},
            "different_groups": {"heads": {
                "params": {"dense_ratio": ratio}, "modules": ["dense"],
                "related_modules": [["query", "key", "value"]]}},
        },
    }  # fmt: skip


def sparse(method: str, offset: int, end: int, **more: object) -> dict:
    """Single weights of the blocks."""
    shared = {"enabled": True, "schedule_offset": offset, "method": method, **more}
    if method == "snip_momentum":
        shared |= {"schedule_offset_end": end, "schedule_offset_stride": max(1, (end - offset) // 10)}
    params = {} if method == "snip_momentum" else {"params": {"dense_ratio": 0.5}}
    return {
        "sparse_pruning": {"shared_parameters": shared, "different_groups": {"s": {"modules": ["layers"], **params}}}
    }


def main() -> None:
    """Train full models, apply the recipes, print the tables."""
    options = lab.arguments(str(__doc__), model="bert", steps=500, recovery=500, heads=8)
    begin, end = options.recovery // 20, options.recovery // 2
    recipes = {
        "half of rows and heads, removed": rows_and_heads(0.5, options.heads, begin),
        "half of the weights (l1)": sparse("l1", begin, end),
        "2 of 4 weights (snip)": sparse("snip_momentum", begin, end, block_pattern="2:4"),
    }
    text = lab.Text(options.model)
    table = lab.Table(text, {"half of rows and heads, removed": 2.0}, options.report)
    for seed in range(options.seeds):
        full = lab.train(lab.builder(options, seed)(), text, options.steps, seed=seed)
        table.begin(full, seed)
        for name, config in recipes.items():
            model = init_compression(copy.deepcopy(full), config)
            distillation = DistillationLoss(model, Teacher(copy.deepcopy(full)), alpha=0.5)
            lab.train(model, text, options.recovery, seed=seed, lr=5e-4,
                      scheduler=compression_scheduler(model, config), distillation=distillation)  # fmt: skip
            distillation.remove()
            table.report(name, model)
            redundancy_clean(model, config, example=text.windows(0)[0])
            table.add(name, model, lab.dense_size(model))
    table.finish()


if __name__ == "__main__":
    main()
