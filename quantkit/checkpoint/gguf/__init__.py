"""Read GGUF files of llama.cpp as checkpoints: header, block types, tensor names, config and tokenizer."""
