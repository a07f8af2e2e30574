"""The fused functions of a transformer layer: layer norm, bias + GELU, dropout, masked softmax; import them from
`dsx_ops`.

One file per function: its operators (`torch.ops.dsx_ops.*`), their PyTorch references, which are oracle and fallback,
and the calls of the compiled kernels. Arithmetic is fp32; results are rounded once, to the dtype of the input. float64
inputs are computed in float64 by plain torch operations, so that `torch.autograd.gradcheck` works.

| function | operators |
|---|---|
| `layer_norm`, `add_layer_norm` | `layer_norm`, `add_layer_norm`, `layer_norm_backward` |
| `bias_gelu` | `bias_gelu`, `bias_gelu_backward` |
| `dropout`, `dropout_mask`, `bias_dropout_residual` | `dropout`, `bias_dropout_residual`, `bias_grad` |
| `masked_softmax` | `masked_softmax`, `softmax_backward` |
"""
