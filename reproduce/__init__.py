"""Run the papers' experiments here, keep records of them, and make tables from the records.

The folders are, from the bottom up: `machine` and `models`, `records`, `experiments`, `numbers`,
`run` and `predict`, `tables`, `report` and `regression`, `cli`. Each folder may import from the
folders below it, and from `torchgpipe`.
"""
