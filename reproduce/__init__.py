"""Run the papers' experiments on this machine, record results, and make tables from the records.

The folders are, from the lowest to the highest: `machine` and `models`, `records`, `experiments`,
`numbers`, `run` and `predict`, `tables`, `report` and `regression`, `cli`. Each folder may import
from the folders below it, and from `torchgpipe`.
"""
