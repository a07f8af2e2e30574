"""Extreme compression (XTC): fewer layers and few bits, learnt from the full model, as a table.

    python packages/dsx-compress/examples/xtc.py                                        # some minutes on two cores
    python packages/dsx-compress/examples/xtc.py --steps 20 --student-steps 20 --width 32 --seeds 1   # a look at it

A model is trained. Students with half of its layers get int8, ternary or binary weights, and one with all layers binary
ones; each begins with the teacher's layers and is trained on the task and on the teacher's logits.
"""

import copy

import text_lab as lab
from dsx_compress import DistillationLoss, Teacher, compression_scheduler, init_compression


def quantize(bits: int, groups: int) -> dict:
    """All weights of the blocks."""
    return {"weight_quantization": {
        "shared_parameters": {"enabled": True, "quantize_groups": groups, "quantize_weight_in_forward": True},
        "different_groups": {"blocks": {"params": {"start_bits": bits, "target_bits": bits}, "modules": ["layers"]}},
    }}  # fmt: skip


RECIPES = (("half of the layers, int8", 8, 2, 1.0), ("half of the layers, ternary", 2, 2, None),
           ("half of the layers, binary", 1, 2, 5.0), ("all layers, binary", 1, 1, 5.0))  # fmt: skip


def main() -> None:
    """Train full models, apply the recipes, print the tables."""
    options = lab.arguments(str(__doc__), steps=500, student_steps=600)
    text = lab.Text(options.model)
    table = lab.Table(text, {name: goal for name, _, _, goal in RECIPES if goal is not None}, options.report)
    for seed in range(options.seeds):
        build = lab.builder(options, seed)
        full = lab.train(build(), text, options.steps, seed=seed)
        table.begin(full, seed)
        for name, bits, every, _ in RECIPES:
            kept = list(range(every - 1, options.layers, every))
            student, config = lab.student_of(full, build, kept), quantize(bits, groups=options.width)
            scheduler = compression_scheduler(init_compression(student, config), config)
            distillation = DistillationLoss(student, Teacher(copy.deepcopy(full)), alpha=0.9)
            lab.train(student, text, options.student_steps, seed=seed, scheduler=scheduler, distillation=distillation)
            distillation.remove()
            table.report(name, student)
            table.add(name, student, lab.packed_size(student, config))
    table.finish()


if __name__ == "__main__":
    main()
