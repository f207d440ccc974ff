"""Packed layers for the plug-ins of vLLM and SGLang, which load a checkpoint one tensor at a time."""
