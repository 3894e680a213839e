"""Guards: they keep a task's two passes equal, and keep one task from affecting another task.

A checkpointed task runs its layers twice: a first pass, and a recomputation in backward. Each guard
takes care of one thing that could differ between the two passes, such as buffers.

All guards have the same methods, which guard.py lists. Each other file has the class of one guard,
and begins with what goes wrong without the guard and what the guard costs. Which guards a stage has
is decided in `torchgpipe.task.stage_guards`. The page `docs/how-it-works.md` has a table of all
guards and their methods.

To add a guard:

1. Write a class that overrides the methods that the guard needs, and add it to `StageGuards`.
2. Add a row to the table in `docs/how-it-works.md`. A test checks this table.
3. In tests/behaviours, add test cases that fail without the guard, and that name the guard.
4. In tests/planted/rows.json, add a fault: a change of the code that leaves the guard out. A test
   has to fail if the code has this fault.
"""
