"""Run the papers' experiments here: experiments as data, one runner, records, and tables made from records.

Folders from the bottom up: `machine` and `models`, `records`, `experiments`, `numbers`, `run` and `predict`, `tables`,
`report` and `regression`, `cli`. Each may import from those below it, and `torchgpipe`.
"""
