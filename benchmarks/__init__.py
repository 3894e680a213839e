"""Programs that measure the library, or compare it with other libraries.

They are not installed with the library. Only other benchmarks and tests import them. They may
import `torchgpipe`, `reproduce`, and the training cases and comparisons of `tests.behaviours`.
"""
