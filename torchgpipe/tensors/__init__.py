"""The tensors that tasks pass on, copies between devices, and uses of private names of PyTorch."""
