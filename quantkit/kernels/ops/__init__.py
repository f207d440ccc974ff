"""Ops between the linears: norms, rotary embedding, activations, attention, KV append, argmax."""
