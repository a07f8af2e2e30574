"""The errors of this package. Each says what was got, what was expected and what to do."""


class MoEConfigError(ValueError):
    """An argument has a wrong size, name, group or shape."""


class RoutingError(RuntimeError):
    """A router's logits are not finite, on this rank or on another rank of its expert-parallel group."""


class ConversionError(ValueError):
    """A model or one of its modules cannot be turned into expert-parallel form, or back."""


class ExpertStateError(ValueError):
    """A state dict does not fit the experts of a model: a name is missing, or a shape differs."""
