"""DeepSpeed's functions and commands for checkpoints, over dsx_checkpoint.

    python -m dsx_compat.checkpoint.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR
    python -m dsx_compat.checkpoint.zero_to_torch CHECKPOINT_DIR OUTPUT_DIR --dtype bf16
    python -m dsx_compat.checkpoint.ds_to_universal --input_folder RUN/TAG --output_folder RUN/NEW

Each reads checkpoints of DeepSpeed and of dsx. The names are in the modules: importing this package loads no torch.
"""
