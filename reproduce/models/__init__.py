"""Define the models. `MODELS` in the module `built` has each model by its name.

This file and `sizes` do not import torch. This folder may import `torchgpipe`. Of `reproduce`, it
may import only `error`.
"""
