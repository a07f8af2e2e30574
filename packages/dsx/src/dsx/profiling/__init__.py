"""Profilers under the names that scripts know."""
