"""Guards: they keep a task's two passes equal, and keep one task from affecting another task.

A checkpointed task runs its layers twice: a first pass, and a recomputation in backward. Each guard
takes care of one thing that could differ, such as buffers. A guard is one class in one file. All
guards have the same methods (guard.py). `torchgpipe.task.stage_guards` says which guards a stage
has. The page `docs/how-it-works.md` has a table of guards and methods, which a test checks.

To add a guard, write a class with the methods that it needs, and add it to `StageGuards`. Add a row
to the table in the docs, rows to the behaviours' table (tests/behaviours) that name the guard, and
a planted fault (tests/planted) that leaves the guard out.
"""
