"""flash_attn.ops: the rotation that published files call by this name."""
