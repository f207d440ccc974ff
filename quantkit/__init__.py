"""Quantize Hugging Face checkpoints to packed low-bit formats, run them packed, and measure the cost.

Importing this package touches no GPU and no network and imports neither transformers nor triton. It
registers quantkit's formats with transformers the moment transformers' quantizers are imported, so a
plain `AutoModelForCausalLM.from_pretrained(packed_directory)` works afterwards.
"""
