"""flash_attn.ops.triton; nothing here needs Triton."""
