"""Native kernels for the CPU, each with an eager twin in the module that uses it."""
