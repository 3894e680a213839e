"""The machine that runs: its devices, and what it consists of.
It may import `torchgpipe`, nothing else of `reproduce`."""
