"""The pieces of an optimizer step.

* the plan: `plan` has the step as data, `runner` executes it, `inner` calls the user's optimizer;
* what is stepped: `masters` makes the tensors that the optimizer updates, `states` knows where its states live,
  `param_groups` shows the user the model's parameters in the optimizer's groups;
* what an optimizer can do: `parts` (may it be stepped in parts), `sparse` (does it take rows);
* numbers over ranks: `norm` (the global norm), `step_norm` (how a step gets it), `segments` (norms per tensor),
  `nonfinite` (a warning);
* what the user changed since the last step: `edits` (values), `frozen` (`requires_grad`), `model_check` (modules);
* at other times: `during_backward` steps units while backward runs, `late` applies an update one step later; both use
  `worker` (a thread) and `failures` (a failure of one rank is raised on all ranks).
"""
