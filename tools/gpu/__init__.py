"""`tools/dev.py gpu`: what is to be learnt in the first hour on a GPU, stage by stage (see `command`)."""
