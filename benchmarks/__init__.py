"""Programs that measure the library, or compare it with others. They are not installed.

They may import `torchgpipe`, `reproduce` and, for rows and comparisons, `tests.behaviours`.
Only tests import them.
"""
