"""The errors of this package. Each says what was got, what was expected and what to do."""


class PipelineError(RuntimeError):
    """The pipeline was used in a way that does not work. The message says why, and what works instead."""


class ScheduleError(ValueError):
    """A schedule cannot be built, read or executed. The message lists what is wrong with it."""


class PartitionError(ValueError):
    """Layers cannot be divided over the stages in the requested way."""


class TensorSliceError(ValueError):
    """A layer or a tensor cannot be sliced over the ranks in the requested way."""


class StageError(PipelineError):
    """One stage failed. Every rank of the pipeline raises this error with the same text.

    Attributes:
        stage: index of the stage that failed.
        rank: its global rank.
        micro_batch: index of the micro-batch, or None if it failed outside a micro-batch.
        layer: name of the layer, or None where it is not known (inside autograd's backward).
    """

    def __init__(self, text: str, *, stage: int | None, rank: int, micro_batch: int | None, layer: str | None) -> None:
        super().__init__(text)
        self.stage, self.rank, self.micro_batch, self.layer = stage, rank, micro_batch, layer
