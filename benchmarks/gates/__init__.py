"""Questions about the library's speed, each a program whose answer is a record or an exit status.
They may import `benchmarks.harness`, `benchmarks.pipelines`, `reproduce` and `torchgpipe`."""
