"""Attention modules and helpers for models of the BERT family."""
