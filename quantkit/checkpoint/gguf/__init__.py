"""GGUF files of llama.cpp as checkpoints: header, block types, names of tensors, config and tokenizer."""
