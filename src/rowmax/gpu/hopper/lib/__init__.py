"""What the Hopper kernels share."""
