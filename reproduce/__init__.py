"""Run the experiments of the GPipe papers, record the results, and make tables from the records.

The folders form layers. A folder may import only folders of lower layers, and `torchgpipe`. From
the lowest layer to the highest:

1. `machine` and `models`
2. `records`
3. `experiments`
4. `numbers`
5. `run` and `predict`
6. `tables`
7. `report` and `regression`
8. `cli`
"""
