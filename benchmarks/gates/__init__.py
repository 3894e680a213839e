"""Contain programs that check the library's speed or overhead.

Each program answers with a record or with its exit status. The programs may import
`benchmarks.harness`, `benchmarks.pipelines`, `reproduce` and `torchgpipe`.
"""
