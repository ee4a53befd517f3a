"""Set what OpenMP reads once, before anything imports torch.

Threads that spin while they wait for each other take the cores that other programs want, and wait
the longer for it: on two cores with six programs, 66 tests took 123 s spinning and 6 s asleep.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
