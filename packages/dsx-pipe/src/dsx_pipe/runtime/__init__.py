"""Executes a schedule: messages between ranks, forward and backward of stages, steps, failures, reports."""

from .messages import PeerLost
from .pipeline import Pipeline
from .report import StepReport
from .stage import StageCallbacks

__all__ = ["PeerLost", "Pipeline", "StageCallbacks", "StepReport"]
