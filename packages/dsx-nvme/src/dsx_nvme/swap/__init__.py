"""Swappers: optimizer states and parameters that live on disk and are brought into memory one after the other."""

from .optimizer import OptimizerSwapper, Visit
from .parameter import ParameterSwapper
from .plan import Action, Piece, SwapPlan, make_plan

__all__ = ["Action", "OptimizerSwapper", "ParameterSwapper", "Piece", "SwapPlan", "Visit", "make_plan"]
