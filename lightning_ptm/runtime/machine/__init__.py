"""Free resources of the machine and its control groups, and the heap of the process."""
