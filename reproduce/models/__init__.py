"""The models, which `built` has by name. This file and `sizes` need no torch.

This folder may import `torchgpipe`, and nothing else of `reproduce` but `error`.
"""
