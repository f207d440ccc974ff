"""Models: structure, names, decoder blocks, hidden states, tokenizers, and ranks that share work."""
