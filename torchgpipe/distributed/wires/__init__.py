"""Messages of tensors from rank to rank, over gloo and NCCL."""
