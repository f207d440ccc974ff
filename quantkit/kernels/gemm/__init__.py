"""y = x W^T: a folder for each kernel, with the kernel, its tiles and its launch."""
