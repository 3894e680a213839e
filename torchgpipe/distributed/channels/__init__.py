"""Send messages with tensors from rank to rank, over gloo and NCCL."""
