"""What runs tasks in their order: programs for threads and ranks, and the graph engine.

It may import `task`, `tensors` and `skip`.
"""
