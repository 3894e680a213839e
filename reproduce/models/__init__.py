"""The models, which `built` has by name. This file and `sizes` need no torch.
They may import `torchgpipe`, nothing else of `reproduce` but `error`."""
