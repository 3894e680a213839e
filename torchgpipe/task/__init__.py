"""One task: its graph, and the parameters, buffers, random numbers, modes and batch norm that its layers meet.

It may import `tensors` and `skip`.
"""
