"""The GPU backends and what they share: assembling, launching, private interfaces of Triton."""
