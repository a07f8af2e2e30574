"""Programs written for DeepSpeed run unchanged on dsx.

Once dsx-compat is installed, `import deepspeed` gives DeepSpeed's names over dsx, and tools that look for an installed
distribution `deepspeed` (Accelerate, transformers, Lightning) find one. `activate()` does this for one process, without
changing the environment, even if the real DeepSpeed is installed:

    import dsx_compat
    dsx_compat.activate()  # before anything imports deepspeed
    import deepspeed

No training code is implemented here: a name maps to dsx, or is a thin layer over PyTorch that only scripts written for
DeepSpeed need.

| file | what |
|---|---|
| `names`, `unsupported` | the tables: name of DeepSpeed -> name of dsx; what to use instead of the others |
| `refusing` | classes whose errors say so for members that dsx does not have |
| `modules` | makes modules from the tables, on first use |
| `getters` | configured values: methods of the engine, attributes of `DeepSpeedConfig` |
| `scaler` | the loss scale |
| `switches` | questions to the engine: `fp16_enabled()`, `zero_optimization()`, ... |
| `engine`, `entry`, `settings` | the engine under DeepSpeed's names; `initialize`; removal of keys without effect |
| `parameters` | `ds_shape`, `ds_numel`, `ds_status`, ... of parameters that stage 3 manages |
| `gradients` | norms and checks of `deepspeed.runtime.utils` that all ranks agree on |
| `slicing` | `tp_model_init`, recorded until `initialize` slices the model |
| `moe`, `sequence`, `sparse_tensor` | classes and functions with DeepSpeed's shapes and signatures |
| `activation` | where the `deepspeed` package is, `activate()`, and which other one hides it |
| `arguments`, `lr_arguments` | options of the command line, as `add_config_arguments` makes them |
| `op_builder` | `CPUAdamBuilder().load()` and the other builders; nothing is built |
| `checkpoint` | `zero_to_fp32`, `zero_to_torch`, `ds_to_universal` |
| `grid` | `PipelineParallelGrid`, and the `PipelineModule` whose `mpu` it is |
| `accelerator` | one interface to the devices: `get_accelerator()` |
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
