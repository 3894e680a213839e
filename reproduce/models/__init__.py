"""Define the models. The dictionary `MODELS` in the module `built` maps names to models.

This file and the module `sizes` do not import torch, because that would take seconds.
"""
