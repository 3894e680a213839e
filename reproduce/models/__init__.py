"""Define the models. `MODELS` in the module `built` has each model by its name.

This file and the module `sizes` do not import torch, because that would take seconds.
"""
