"""States by parameter name: read out, read in, counted.

`slices` what a rank owns, `loading` filling it, `local` a rank's own dictionary, `templates` states before the first
step.
"""
