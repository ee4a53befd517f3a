"""The operators that PyTorch sees."""
