"""What lies between the linears: norms, rotary positions, activations, attention, the KV cache, argmax."""
