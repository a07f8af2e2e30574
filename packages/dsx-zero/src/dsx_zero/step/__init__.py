"""The pieces of an optimizer step.

* the plan: `plan` has the step as data, `runner` executes it;
* what is stepped: `masters` makes the tensors that the optimizer updates, `states` knows where its states live;
* the user's optimizer: `inner` (what it can do, what its groups hold, calls of it), `sparse` (does it take rows);
* numbers over ranks: `norm` (the global norm), `segments` (norms per tensor), `nonfinite` (a warning);
* what the user changed since the last step: `edits` (values), `model_check` (modules and `requires_grad`);
* at other times: `host_step` says when the host steps masters beside the device's work (during backward, or one step
  late), `host_thread` steps them, `stepped` finds what was changed since; `failures` raises a failure of one rank on
  all ranks.
"""
