"""What the machine and its control groups have free, and the process's heap."""
