"""The CUDA kernels: how they are found, and how tensors become tables of device addresses. Used by the rest of the
package.

| file | what |
|---|---|
| `loader` | finds the compiled module `dsx_ops._cuda`, or says why there is none |
| `launch` | the stream and device of a call, dtypes, tables |
| `optimizers` | updates over lists of tensors |
| `flat` | norm, scaling and clipping over lists of tensors |
| `operators` | kernels of `torch.ops.dsx_ops.*` for CUDA tensors |

Everything runs on torch's current stream and returns without waiting for the device. The kernels read and write what
torch's allocator gave out on that stream; tensors made on another stream need the same care as with any torch
operation. Without the module torch's own kernels serve.
"""
