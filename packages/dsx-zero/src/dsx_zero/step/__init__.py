"""The pieces of an optimizer step.

`plan` the step as data, `runner` executes it, `parts` whether an optimizer may be stepped in parts, `masters` what it
steps, `states` where its states live, `norm` and `segments` norms over ranks, `param_groups` the optimizer's groups
with the model's parameters, `edits`, `frozen` and `model_check` what the user changed since, `nonfinite` a warning.
"""
