"""Contain programs that measure the library, or compare it with other libraries.

These programs are not installed, and only tests import them. They may import `torchgpipe`,
`reproduce` and, for rows and comparisons, `tests.behaviours`.
"""
