"""Publishing: the model card of a packed checkpoint, and its upload to the hub."""
