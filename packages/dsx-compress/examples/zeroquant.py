"""Post-training quantisation as in ZeroQuant, as a table: group-wise weights, token-wise activations, and blocks
trained to give what they gave before.

    python packages/dsx-compress/examples/zeroquant.py                                 # some minutes on two cores
    python packages/dsx-compress/examples/zeroquant.py --steps 20 --block-steps 5 --width 32 --seeds 1   # a look at it
"""

import copy

import text_lab as lab
from dsx_compress import PostTrainingConfig, quantize_post_training

RECIPES = (("int8", 8, None, False), ("int8, activations of 8 bits", 8, 8, False), ("int4", 4, None, False),
           ("int4, distilled block by block", 4, None, True), ("int3", 3, None, False),
           ("int3, distilled block by block", 3, None, True))  # fmt: skip


def main() -> None:
    """Train full models, apply the recipes, print the tables."""
    options = lab.arguments(str(__doc__), steps=500, block_steps=100, batches=8)
    text, group = lab.Text(options.model), min(64, options.width)
    table = lab.Table(text, {}, options.report)
    for seed in range(options.seeds):
        full = lab.train(lab.builder(options, seed)(), text, options.steps, seed=seed)
        table.begin(full, seed)
        calibration = [text.windows(10**5 + place)[0] for place in range(options.batches)]
        for name, bits, inputs, distilled in RECIPES:
            model = copy.deepcopy(full)
            how = PostTrainingConfig(
                bits=bits, group_size=group, activation_bits=inputs, blocks="layers" if distilled else "",
                steps=options.block_steps if distilled else 0,
            )  # fmt: skip
            quantize_post_training(model, calibration, how)
            table.report(name, model)
            table.add(name, model, lab.packed_size(model))
    table.finish()


if __name__ == "__main__":
    main()
