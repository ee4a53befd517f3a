"""A call: its inputs and problem, the checks of them, and the choice of backends."""
