"""Version of dsx-compat, read by the build, and the version of DeepSpeed whose interface it has."""

__version__ = "0.1.0"

# The newest version with the interface and behaviour of dsx. From 0.19.6 on DeepSpeed refuses `warmup_num_steps: 0`.
DEEPSPEED_VERSION = "0.18.9"
