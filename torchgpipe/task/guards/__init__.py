"""Guards: what both passes of a task must meet alike, and what must not leak from task to task.

Each guard is one file with one class, and all have the same moments (guard.py). Which guards a
stage has in a mini-batch is said in `torchgpipe.task.stage_guards`. A table of guards and moments
is in the docs' page on how it works, and is checked against the code.

To add a guard, write a class with the moments that it needs, add it to `StageGuards` where a stage
needs it, give it a row in that table, rows in the behaviours' table that name it, and a planted
fault that leaves it out.
"""
