"""Messages of tensors from rank to rank, over gloo and NCCL.
It may import `engine`, `tensors` and `skip`, nothing else of `distributed`."""
