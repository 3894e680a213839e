"""Define the models. `MODELS` in the module `built` has each model by its name.

This file and `sizes` do not import torch.
"""
