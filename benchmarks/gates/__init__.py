"""Questions about the library's speed: each program answers by a record or an exit status.

They may import `benchmarks.harness`, `benchmarks.pipelines`, `reproduce` and `torchgpipe`.
"""
