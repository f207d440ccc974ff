"""Device functions that the Gluon kernels share: staging, epilogues, reductions, prefetch."""
