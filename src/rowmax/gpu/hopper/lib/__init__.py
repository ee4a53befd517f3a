"""The parts that Hopper kernels share."""
