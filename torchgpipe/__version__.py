"""Define the version of torchgpipe, in a file that can be run without importing PyTorch."""

__version__ = "0.1.0"
