"""Programs that check the library's speed or overhead.

A program writes a record, or exits with status 1 if its check fails. The programs may import
`benchmarks.harness`, `benchmarks.pipelines`, `reproduce` and `torchgpipe`.
"""
