"""Programs written for DeepSpeed run unchanged on dsx.

Once dsx-compat is installed, `import deepspeed` gives DeepSpeed's names over dsx, and tools that look for an installed
distribution `deepspeed` (Accelerate, transformers, Lightning) find one. For one process, without touching the
environment, and also where the real DeepSpeed is installed:

    import dsx_compat
    dsx_compat.activate()  # before anything imports deepspeed
    import deepspeed

No training code is implemented here: each name maps to dsx.

| file | what |
|---|---|
| `names` | the tables: name of DeepSpeed -> name of dsx, or what to use in its place |
| `modules` | makes modules from the tables, on first use |
| `engine`, `entry`, `settings` | `initialize`, the engine under DeepSpeed's names, unneeded keys that programs write |
| `parameters` | `ds_shape`, `ds_numel`, `ds_status`, ... of parameters that stage 3 manages |
| `activation` | where the `deepspeed` package is, `activate()`, and which other one hides it |
| `commands` | `deepspeed`, `ds_report`, `ds_bench`, ... |
| `_site` | the folder that holds the package `deepspeed` and its metadata |
"""

from ._version import DEEPSPEED_VERSION, __version__
from .activation import activate
from .errors import CompatError, CompatWarning, NotSupportedError, WrongDeepSpeedError

__all__ = [
    "DEEPSPEED_VERSION",
    "CompatError",
    "CompatWarning",
    "NotSupportedError",
    "WrongDeepSpeedError",
    "__version__",
    "activate",
]
