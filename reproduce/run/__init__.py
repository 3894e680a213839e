"""Run the rows of experiments: on devices here, emulated, or for their memory alone.

It may import `experiments`, `records`, `models`, `machine` and `torchgpipe`.
"""
