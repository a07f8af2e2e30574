"""Curricula: difficulty as a function of the step (`schedule`), and samples drawn by difficulty (`sampler`)."""

from .metrics import MetricOrder
from .sampler import CurriculumSampler, Draw
from .schedule import CurriculumScheduler
from .truncation import truncate_batch

__all__ = ["CurriculumSampler", "CurriculumScheduler", "Draw", "MetricOrder", "truncate_batch"]
