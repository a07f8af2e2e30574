"""Version of dsx-compat, read by the build, and the version of DeepSpeed whose interface it has."""

__version__ = "0.1.0"

# The newest version whose interface and habits hold here: 0.19.6 and later refuse `warmup_num_steps: 0`, dsx takes it.
DEEPSPEED_VERSION = "0.18.9"
