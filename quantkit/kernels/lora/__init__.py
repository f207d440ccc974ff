"""LoRA beside a packed linear: one autograd function for training, two launches in a decoding step."""
