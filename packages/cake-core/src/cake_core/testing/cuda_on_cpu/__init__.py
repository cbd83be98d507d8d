"""Stand-ins for the CUDA headers, and a harness that runs kernels and bindings lane by lane on the CPU."""
