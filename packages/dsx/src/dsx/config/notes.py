"""Notes on single keys for which documentation and common use differ. The reference and ``explain`` show them."""

from __future__ import annotations

__all__ = ["ALWAYS_SHOWN", "CLIPPING", "NOTES"]

CLIPPING = "gradient_clipping"

# Defaults that change training although the user did not set them; shown even if defaults are left out.
ALWAYS_SHOWN = frozenset({CLIPPING})

NOTES: dict[str, str] = {
    CLIPPING: (
        "Gradients are clipped to norm 1.0 by default; 0 switches it off. 1-bit optimizers do so only in steps"
        " without compression; in the other steps each rank clips its own gradient by its own norm."
    ),
    "steps_per_print": "10, as documented; DeepSpeed prints nothing unless it is set.",
    "communication_data_type": "A name, not a boolean.",
    "fp16.initial_scale_power": "16; one older page says 32.",
    "fp16.min_loss_scale": "1; one older page says 1000.",
    "comms_logger.enabled": "False means off; DeepSpeed's logger is on as soon as the block exists.",
    "elasticity.prefer_large_batch": "The documented name; prefer_larger_batch is read too.",
    "aio.intra_op_parallelism": "thread_count, the documented name, is read too.",
    "flops_profiler.enabled": "Also switches wall_clock_breakdown on.",
}
