"""The pieces of an optimizer step.

`masters` what the optimizer steps, `norm` and `segments` norms over ranks, `param_groups` the optimizer's groups with the model's
parameters, `edits`, `frozen` and `model_check` what the user changed since, `nonfinite` a warning.
"""
