"""Measured tiles (launch configurations) of kernels: tables, the search that fills them, and timing."""
