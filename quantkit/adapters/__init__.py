"""A LoRA in the weights of a model, and the methods that round these again."""
