"""Test ranks, seeds, tolerances and tiny models shared by all test suites."""
